"""Checkpoints after training: look into one, export it, prove it, and turn it into another preset's."""
