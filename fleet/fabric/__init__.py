"""The acceptance test of the RDMA fabric: which NICs are tested with which, and the verdict on each NIC.

This code opens no connection. ``tasks/fabric`` runs the tests on the nodes.
"""
