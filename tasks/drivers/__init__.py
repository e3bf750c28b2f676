"""Drivers of NICs and GPUs, and RDMA between the two."""
