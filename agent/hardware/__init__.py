"""What hardware there is: PCI functions, RDMA devices, CPUs, and where interrupts can go."""
