"""Programs in Go: how the lab builds them, and the sources of its own."""
