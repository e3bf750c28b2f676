"""A tree of files, links and folders, as a reader of sysfs and /proc sees them."""

import errno
import os

from attrs import define, field


def error(number: int, path: str) -> OSError:
    """What the kernel says of a path."""
    return OSError(number, os.strerror(number), path)


@define(eq=False)
class Tree:
    """``files``: what is in them; ``links``: where they point; ``folders``: what is in them. Each by its whole path."""

    files: dict[str, str] = field(factory=dict)
    links: dict[str, str] = field(factory=dict)
    folders: dict[str, set[str]] = field(factory=dict)

    def read(self, path: str) -> str:
        if path not in self.files:
            below = path.rpartition("/")[0] in self.files
            raise error(errno.EISDIR if path in self.folders else errno.ENOTDIR if below else errno.ENOENT, path)
        return self.files[path]

    def names(self, path: str) -> list[str]:
        if path not in self.folders:
            raise error(errno.ENOTDIR if path in self.files else errno.ENOENT, path)
        return sorted(self.folders[path])

    def target(self, path: str) -> str:
        """The last part of where a link points."""
        if path not in self.links:
            raise error(errno.ENOTDIR if path.rpartition("/")[0] in self.files else errno.ENOENT, path)
        return self.links[path].rpartition("/")[2]

    def folder(self, path: str) -> None:
        """Make a folder, and those that it is in."""
        while path and path not in self.folders:
            self.folders[path] = set()
            parent, _, name = path.rpartition("/")
            if parent in self.folders:
                self.folders[parent].add(name)
                return
            self.folder(parent)
            self.folders.setdefault(parent, set()).add(name)

    def put(self, path: str, text: str) -> None:
        """A file with this in it; its folder is made too."""
        self._enter(path)
        self.files[path] = text

    def link(self, path: str, to: str) -> None:
        """A link that points there; its folder is made too."""
        self._enter(path)
        self.links[path] = to

    def _enter(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        self.folder(folder)
        self.folders[folder].add(name)

    def unlink(self, path: str) -> None:
        """A file or link goes, if it is there."""
        folder, _, name = path.rpartition("/")
        self.links.pop(path, None)
        self.files.pop(path, None)
        self.folders.get(folder, set()).discard(name)

    def remove(self, path: str) -> None:
        """Whatever is there goes, and what is in it."""
        for name in list(self.folders.get(path, ())):
            self.remove(f"{path}/{name}")
        self.folders.pop(path, None)
        self.unlink(path)
