"""Tests the RDMA fabric between the nodes of the inventory: docs/fabric.md."""

from tasks import fabric, node_spec

spec = node_spec.read()
fabric.prepare()
fabric.prove(spec=spec)
