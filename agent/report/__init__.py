"""What the agent says of the node: its records and files, who reads them, and the names used in Kubernetes."""
