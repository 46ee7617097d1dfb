"""Attestation: what was really in force, read back from the live objects and held against the preset's promise."""
