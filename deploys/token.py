"""Brings a node its token for the API server, and nothing else: after the node has joined, or once it is no longer shut out."""

from tasks import kubernetes, node_spec

kubernetes.configure(spec=node_spec.read())
