"""Hardware as plain facts: what this machine has, without importing torch."""
