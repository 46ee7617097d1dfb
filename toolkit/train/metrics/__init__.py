"""Measurements of a run: timer, memory by phase, profiler, evaluation, early stopping."""
