"""Plan a job before anything is launched: memory, communication, step time, and the preset to use. No torch."""
