"""What this machine can do, what is wrong, and the line that fixes it."""
