"""Holds of packages: apt's, and dnf's version locks.

/var/lib/trackbed/holds  the holds that the deploy has set, one a line. The removal releases only these.
"""

from __future__ import annotations

from pyinfra.api.command import StringCommand

from agent.report.names import STATE_FOLDER
from tasks.common.commands import script

PATH = f"{STATE_FOLDER}/holds"

LOCKS = """
locks() {  # argument: the root folder
  list=$(sed -n 's/^locklist *= *//p' "$1/etc/dnf/plugins/versionlock.conf" 2>/dev/null || true)
  sed '/^#/d; /^[[:space:]]*$/d' "$1${list:-/etc/dnf/plugins/versionlock.list}" 2>/dev/null || true
}
"""
"""A shell function that prints dnf's version locks. `dnf versionlock list` would load all repositories first."""

HOLDS = (
    LOCKS
    + """
holds() {  # argument: the root folder
  if command -v apt-mark >/dev/null; then apt-mark showhold; fi
  locks "$1"
}
"""
)
"""A shell function that prints all holds."""

NOTED = (
    HOLDS
    + """
noted() {  # arguments: the file, and the command that sets holds
  file=$1; shift
  mkdir -p "${file%/*}"
  before=$(holds '')
  "$@"
  holds '' | grep -vxFe "$before" >> "$file" || true
}
"""
)
"""A shell function that runs a command, and notes the holds that are new after it."""


def hold(*command: str) -> StringCommand:
    """For an operation: run the command that sets holds, and note them."""
    return script(f'{NOTED}noted "$@"', PATH, *command)
