"""What the deploy does to a node: one file a concern, composed by deploy.py."""
