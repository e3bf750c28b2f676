"""What the spec asks for of this machine, and what one pass has read of it."""
