"""Real machines as data, and what Trackbed makes of each."""
