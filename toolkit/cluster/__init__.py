"""Job files for several nodes: SLURM, SkyPilot, Kubernetes and plain ssh start torchrun; nothing here is a launcher."""
