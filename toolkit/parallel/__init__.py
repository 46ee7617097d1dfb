"""Dimensions of parallelism beside data parallelism: how ranks are divided, and what the libraries need to be right.

The modules below `layout` import torch and the libraries inside their functions.
"""
