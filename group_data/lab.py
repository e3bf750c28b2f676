"""The virtual machines of lab/: two Intel 82576 ports each, as QEMU's igb emulates them."""

# No RDMA hardware here, so no RDMA modules; the PF's driver is loaded by udev, the VFs' by us, to have it in any case.
kernel_modules = ["igbvf"]

# A virtual machine under emulation is slow.
ready_timeout = 180
