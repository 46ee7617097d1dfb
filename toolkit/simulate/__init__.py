"""Scale on paper: pipeline schedules, and failures with checkpoints, by arithmetic and event simulation."""
