"""Observes any `transformers.Trainer`: what is in effect, time, memory, hangs, failures, complete checkpoints."""
