"""The node's condition, labels, taint and Lease in Kubernetes."""
