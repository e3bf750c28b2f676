"""Scripts for a node that print how much memory and how many descriptors its supervisor and worker use."""

# The kernel's own threads of a process, and what it has mapped, are no descriptors.
_PIDS = "$(pgrep -f '[t]rackbed.* (run|worker --activity)')"
MEMORY = f"cat $(printf '/proc/%s/smaps_rollup ' {_PIDS}) | awk '/^Pss:/ {{ sum += $2 }} END {{ print sum }}'"
DESCRIPTORS = f"ls -1 $(printf '/proc/%s/fd ' {_PIDS}) | grep -c '^[0-9]'"
