"""The control host's half of `trackbed`: commands about all nodes at once, asked of the Kubernetes API.

It knows of the agent what a spec and a report are, and nothing else; the node's archive leaves it out.
"""
