"""What a change to configuration files does: findings that are new, and plans before and after."""
