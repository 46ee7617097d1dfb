"""Settings of single engines: DDP communication hooks, DeepSpeed's NVMe offload."""
