"""One file an environment; pyinfra reads them by their paths."""
