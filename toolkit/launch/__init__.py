"""Launching: build the command in one place, run it in another, and know how it ended."""
