"""The unprivileged half: it tells the world what the report says. It knows the report's format, and nothing of the machine.

HTTP reads the report on each request, so what it serves is never older than the file. Whoever publishes elsewhere, and
later (Kubernetes), gets a module of its own here, and a place where it leaves the generation that it has published.
"""
