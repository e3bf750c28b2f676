"""The report on a whole fleet: what Prometheus has of its nodes, and what the last deploy has noted."""
