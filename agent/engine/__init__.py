"""A pass (observe, plan, apply, observe again), what is remembered between passes, and what a pass may disturb."""
