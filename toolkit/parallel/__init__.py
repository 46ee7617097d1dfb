"""Dimensions of parallelism beside data parallelism: how ranks are divided, and what the libraries need to be right."""
