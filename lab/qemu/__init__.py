"""QEMU as the lab uses it: its arguments, its monitor and sockets, and what it leaves to other processes."""
