"""The run folder: what a run writes and others read; status, measurements, checkpoints, heartbeats."""
