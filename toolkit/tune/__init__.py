"""The fastest setting of a job that fits, found by plans, interleaved trials and sequential elimination."""
