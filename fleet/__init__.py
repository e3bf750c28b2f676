"""The control host's half of `trackbed`: commands about all nodes, read from the Kubernetes API.

Of the agent it imports only the records of the spec and the report. The agent's archive does not contain it.
"""
