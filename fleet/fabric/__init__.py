"""The acceptance test of the RDMA fabric: which NICs are tested with which, and what the results say of each NIC.

What is here is pure: it knows no host and no connection. ``tasks/fabric`` runs the tests on the nodes.
"""
