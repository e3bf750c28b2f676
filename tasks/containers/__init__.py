"""Container engines and the runtimes that they start containers by."""
