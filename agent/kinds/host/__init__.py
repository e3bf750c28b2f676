"""The kinds of the host as a whole: its kernel's parameters, modules and memory, and daemons that work against the agent."""

SYSCTLS = "sysctls"
"""The name of the kind of kernel parameters. The addresses of a NIC set some of its netdev's, too."""
