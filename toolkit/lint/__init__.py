"""What a configuration really does: any accelerate YAML, DeepSpeed JSON, Trainer arguments or job script."""
