"""The training script: `accelerate launch --config_file PRESET --num_processes N -m toolkit.train ...`."""
