"""The control host's half of `trackbed`: commands about all nodes, read from the Kubernetes API.

Of the agent it imports only the records of the spec and the report. It is not in the archive that nodes get.
"""
