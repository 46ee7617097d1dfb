"""Compare presets on one job: trials, a ledger that survives, rows that can be trusted, a report."""
