"""Reading files that others may have written: each kind has one reader, with limits."""
