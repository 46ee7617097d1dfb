"""One training job: its arguments, read and checked without torch."""
