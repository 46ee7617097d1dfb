"""A model as data: its tensors and widths, out of `config.json`."""
