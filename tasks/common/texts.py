"""Small text files on a node: read several at once, write them, or replace each in one step."""

from __future__ import annotations

from io import StringIO

from pyinfra.api.command import FileUploadCommand, StringCommand
from pyinfra.api.operation import OperationMeta
from pyinfra.context import host
from pyinfra.operations import files

from tasks.common.commands import Commands, script
from tasks.common.facts import FactBase

MARK = "# Written by Trackbed;"
"""How a file begins that a task wrote as a whole."""

HEADER = f"{MARK} changes here are overwritten.\n"

# $a\\ ends the last line of a file that has no final line end.
_READ = """
for path; do
  if [ -f "$path" ]; then echo "file $path"; sed -e 's/^/:/' -e '$a\\' "$path"; fi
done
"""


class Texts(FactBase[dict[str, str]]):
    """The contents of the given files that exist, by path."""

    default = dict

    def command(self, paths: tuple[str, ...]) -> StringCommand:
        """Print all files by one script."""
        return script(_READ, *paths)

    def process(self, output: list[str]) -> dict[str, str]:
        """Parse a line with each file's path, then the file's lines, each after a colon."""
        texts: dict[str, str] = {}
        path = ""
        for line in output:
            if line.startswith(":"):
                texts[path] += f"{line[1:]}\n"
            else:
                path = line.removeprefix("file ")
                texts[path] = ""
        return texts


def written(name: str, path: str, text: str) -> OperationMeta:
    """Deploy code: write a file; with an empty text, remove it."""
    if text:
        return files.put(name=name, src=StringIO(text), dest=path, mode="644")
    return files.file(name=name, path=path, present=False)


# The rename shows readers the old file or the new one. NFD, which reads a whole folder, ignores dotfiles.
_PLACE = """
chmod 644 "$1"
mv -T "$1" "$2"
"""


def place(path: str, have: str, want: str) -> Commands:
    """For an operation: replace a file in one step if it differs; with an empty text, remove it."""
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
