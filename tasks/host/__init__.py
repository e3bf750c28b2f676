"""The operating system as a whole: its kernel, its boot, and its daemons that would work against the agent."""
