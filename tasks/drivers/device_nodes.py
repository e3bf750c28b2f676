"""Finds the processes that have a device node open, as the agent does (agent/linux/processes.py)."""

# A process that ends meanwhile, and a pattern without nodes, are no errors.
HOLDERS = """
# Prints `PID NODE` for each node that a process has open. Arguments: the root folder; how the paths of the nodes begin.
# It searches twice: find and stat write to the same pipe, and each could break the lines of the other.
holders() (
  {
    find -L "$1$2"* -type c -exec stat -L -c 'node %t:%T %n' {} + || true
    find "$1"/proc/[0-9]*/fd \\( -lname '/dev/*' -o -lname "*$2*" \\) ! -lname '* (deleted)' -printf 'link %p %l\\n' || true
    find "$1"/proc/[0-9]*/fd \\( -lname '/dev/*' -o -lname "*$2*" \\) ! -lname '* (deleted)' \\
      -exec stat -L -c 'open %t:%T %n' {} + || true
  } 2>/dev/null | awk -v root="$1" -v prefix="$2" '
    $1 == "node" { name = substr($3, length(root) + 1); names[$2] = name; known[name] }
    $1 == "link" { links[$2] = $3 }
    $1 == "open" { numbers[$3] = $2 }
    END {
      for (file in links) {
        # A container may have the node under another path, or another node under this one.
        name = links[file]
        if (numbers[file] in names) name = names[numbers[file]]; else if (name in known) continue
        pid = file; sub(/\\/fd\\/[0-9]+$/, "", pid); sub(/.*\\//, "", pid)
        if (index(name, prefix) == 1) print pid, name
      }
    }' | sort -u
)
"""
