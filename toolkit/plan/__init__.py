"""Plan a job before it runs: memory, communication, step time, and the preset to use."""
