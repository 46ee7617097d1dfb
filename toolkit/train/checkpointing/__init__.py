"""Checkpoints: complete or absent; resume and signals."""
