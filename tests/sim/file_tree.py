"""The files of a machine of which nothing is written, by path. Folders follow from their files."""

from attrs import define, field


@define
class FileTree:
    """``files``: what is in them; ``links``: the last part of where they point. Both by path."""

    files: dict[str, str] = field(factory=dict)
    links: dict[str, str] = field(factory=dict)

    def read(self, path: str) -> str:
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def names(self, path: str) -> list[str]:
        entries = {name[len(path) + 1 :].partition("/")[0] for name in self.files if name.startswith(f"{path}/")}
        if not entries:
            raise FileNotFoundError(path)
        return sorted(entries)

    def target(self, path: str) -> str:
        if path not in self.links:
            raise FileNotFoundError(path)
        return self.links[path]

    def read_at(self, path: str, offset: int, size: int) -> bytes:
        raise FileNotFoundError(path)

    def writable(self, path: str) -> bool:
        raise FileNotFoundError(path)

    def write(self, path: str, text: str) -> None:
        raise AssertionError(path)

    def write_at(self, path: str, offset: int, data: bytes) -> None:
        raise AssertionError(path)

    def replace(self, path: str, text: str) -> None:
        raise AssertionError(path)
