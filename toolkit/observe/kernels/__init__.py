"""Which kernels one early step ran, against what was asked for."""
