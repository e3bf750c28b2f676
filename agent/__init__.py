"""The node's half of Trackbed: observe, plan, apply, report."""
