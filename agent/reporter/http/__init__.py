"""Readiness and metrics over HTTP."""
