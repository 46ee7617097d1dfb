"""A run as data: its arguments, its folder, its statuses, its measured steps."""
