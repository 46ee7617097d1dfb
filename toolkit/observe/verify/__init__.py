"""Run-time verification: read back from the live objects what is in effect, and check it against the preset."""
