"""Know before the run: memory, traffic and time of a preset, by arithmetic alone."""
