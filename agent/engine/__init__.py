"""A pass (observe, plan, apply, observe again), what is kept between passes, and what a pass may disturb."""
