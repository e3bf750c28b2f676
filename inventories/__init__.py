"""Inventories: one file for each environment. pyinfra reads them by path."""
