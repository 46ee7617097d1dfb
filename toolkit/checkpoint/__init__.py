"""Checkpoints after training: inspect, export, verify, and convert to another preset or number of processes."""
