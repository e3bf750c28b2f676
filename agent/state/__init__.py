"""What is wanted of the machine, and what was read of it in one pass."""
