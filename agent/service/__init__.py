"""The service's processes: the supervisor, its worker, and what wakes it."""
