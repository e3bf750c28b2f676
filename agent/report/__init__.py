"""The report on the node: its records, the files that hold them, and the names used in Kubernetes."""
