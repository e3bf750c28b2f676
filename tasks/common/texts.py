"""Small text files of a node: read at once, and put under their names whole."""

from __future__ import annotations

from io import StringIO

from pyinfra.api.command import FileUploadCommand, StringCommand
from pyinfra.api.facts import FactBase
from pyinfra.context import host

from tasks.common.commands import Commands, script

_READ = """
for path; do
  if [ -f "$path" ]; then echo "file $path"; sed 's/^/:/' "$path"; fi
done
"""


class Texts(FactBase[dict[str, str]]):
    """The contents of those of the given files that are there, by path."""

    default = dict

    def command(self, paths: tuple[str, ...]) -> StringCommand:
        """One script for all files."""
        return script(_READ, *paths)

    def process(self, output: list[str]) -> dict[str, str]:
        """A line for each file's path, then its own lines, each after a colon."""
        found: dict[str, str] = {}
        path = ""
        for line in output:
            if line.startswith(":"):
                found[path] += f"{line[1:]}\n"
            else:
                path = line.removeprefix("file ")
                found[path] = ""
        return found


# Whoever reads it finds the old one or the new one; who lists the folder leaves dotfiles out (NFD does).
_PLACE = """
chmod 644 "$1"
mv -T "$1" "$2"
"""


def place(path: str, have: str, want: str) -> Commands:
    """Write a file that differs; one that is to be empty is removed."""
    if have == want:
        return
    if not want:
        yield script('rm -f "$1"', path)
        return
    folder, _, name = path.rpartition("/")
    new = f"{folder}/.{name}.new"
    yield script('mkdir -p "$1"', folder)
    yield FileUploadCommand(StringIO(want), new, remote_temp_filename=host.get_temp_filename(new))
    yield script(_PLACE, new, path)
