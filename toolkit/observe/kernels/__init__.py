"""Which kernels one early step ran, against what was asked for: attention, experts, mixers, loss, blocks, optimizer."""
