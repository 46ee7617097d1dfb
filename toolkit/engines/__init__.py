"""Engines: one module for each, and the only place that touches what a library does not publish."""
