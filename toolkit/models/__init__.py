"""Tensors, FLOPs and activation sizes of an architecture, from its `config.json`."""
