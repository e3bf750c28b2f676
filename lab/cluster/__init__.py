"""A real Kubernetes cluster in the lab: a control plane on this host's loopback, and the lab's nodes joined to it."""
