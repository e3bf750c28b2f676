"""Files on a node: which exist; small text files are read several at once, and written, each in one step."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO

from pyinfra.api.command import FileUploadCommand, StringCommand
from pyinfra.api.operation import OperationMeta
from pyinfra.context import host
from pyinfra.operations import files

from tasks.common.commands import Commands, script
from tasks.common.facts import FactBase, Lines

MARK = "# Written by Trackbed;"
"""How a file begins that a task wrote as a whole."""

HEADER = f"{MARK} changes here are overwritten.\n"

# $a\\ ends the last line of a file that has no final line end.
READ = """
for path; do
  unread=${path%/*}/.${path##*/}.unread
  if [ -f "$path" ] || [ -e "$unread" ]; then echo "file $path"; fi
  if [ -f "$path" ]; then sed -e 's/^/:/' -e '$a\\' "$path"; fi
  if [ -e "$unread" ]; then echo ':# not read yet'; fi
done
"""
"""A script that prints files. If a program has not read what :func:`replace` did to a file, also if that removed the file, the
script adds a line that no file has: the texts differ, and the next deploy replaces the file again."""


class Present(Lines):
    """The given paths that exist. A link counts, wherever it leads."""

    def command(self, paths: tuple[str, ...]) -> StringCommand:
        """Test each path."""
        return self.script('for path; do if [ -e "$path" ] || [ -L "$path" ]; then echo "$path"; fi; done', *paths)


class Printed(FactBase[dict[str, str]]):
    """A fact whose script prints files by :data:`READ`: their contents, by path."""

    default = dict

    def process(self, output: list[str]) -> dict[str, str]:
        """Parse what the script prints."""
        return parsed(output)


class Texts(Printed):
    """The contents of the given files that exist, by path."""

    def command(self, paths: tuple[str, ...]) -> StringCommand:
        """Print all files by one script."""
        return self.script(READ, *paths)


def parsed(output: list[str]) -> dict[str, str]:
    """Parse the output of :data:`READ`: a line with each file's path, then the file's lines, each after a colon."""
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


PUT = """
put() {  # arguments: a file with the new text, and the file whose place it takes
  # Otherwise a power cut may leave an empty file.
  sync "$1"
  mv -T "$1" "$2"
}
"""
"""The shell function `put`. The rename shows readers the old file or the new one."""

# NFD, which reads a whole folder, ignores dotfiles.
_REPLACE = f"""{PUT}
marks=
while [ "$1" != -- ]; do
  beside=${{2%/*}}/.${{2##*/}}
  : > "$beside.unread"
  marks="$marks $beside.unread"
  if [ "$1" = put ]; then chmod 644 "$beside.new"; put "$beside.new" "$2"; else rm -f "$2"; fi
  shift 2
done
shift
"""
_READ_NOW = 'for mark in $marks; do rm "$mark"; done\n'


def replace(have: Mapping[str, str], want: Mapping[str, str], after: str = "", *arguments: str) -> Commands:
    """For an operation: replace the files that differ, each in one step, and remove those with no text in ``want``.

    :param have: the texts by path, as on the node.
    :param after: a constant shell script that makes a program read the files, with these ``arguments``. If it fails, or the
        deploy or the host ends before it does, the files stay marked as unread: the next deploy sees a difference.
    """
    differ = [path for path in {**want, **have} if have.get(path, "") != want.get(path, "")]
    if not differ:
        return
    put = [path for path in differ if want.get(path)]
    if put:
        yield script('mkdir -p "$@"', *dict.fromkeys(path.rpartition("/")[0] for path in put))
    for path in put:
        folder, _, name = path.rpartition("/")
        new = f"{folder}/.{name}.new"
        yield FileUploadCommand(StringIO(want[path]), new, remote_temp_filename=host.get_temp_filename(new))
    words = [word for path in differ for word in ("put" if path in put else "remove", path)]
    yield script(_REPLACE + after + _READ_NOW, *words, "--", *arguments)
