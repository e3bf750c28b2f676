"""The spec resolved to this machine, and what one pass has read of it."""
