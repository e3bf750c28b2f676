"""What operators look at: the hardware, a diagnosis, a support bundle, the node as a spec."""
