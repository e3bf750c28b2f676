"""Kinds of the host as a whole, not of one device."""
