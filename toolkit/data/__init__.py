"""Rows of training data: their formats, and reading and checking the files that hold them. No torch."""
