"""The archive of pull mode, after its signature was verified: somebody may have signed the wrong file."""

import gzip
import io
import runpy
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.fuzz.targets import choose, chosen

PROGRAM = runpy.run_path(str(Path(__file__).parents[3] / "templates" / "pull.py"))


def _unpack(data: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="trackbed-fuzz-pull-") as name:
        folder = Path(name)
        archive, outside = folder / "archive.tar.gz", folder / "outside"
        archive.write_bytes(data)
        outside.mkdir()
        with suppress(SystemExit):
            PROGRAM["unpack"](archive, folder / "tree", "https://a/t.tar.gz")
            PROGRAM["issued"](folder / "tree" / "ISSUED", "https://a/t.tar.gz")
        assert sorted(path.name for path in folder.iterdir()) in (
            ["archive.tar.gz", "outside"],
            ["archive.tar.gz", "outside", "tree"],
        )
        assert not list(outside.iterdir())


def _packed(data: bytes) -> None:
    # A checksum of gzip's stands before every other fault.
    _unpack(gzip.compress(data, compresslevel=0, mtime=0))


def _settings(data: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="trackbed-fuzz-pull-") as name:
        file = Path(name) / "pull.json"
        file.write_bytes(data)
        with suppress(SystemExit):
            assert isinstance(PROGRAM["settings"](file), str)


def check(data: bytes) -> None:
    """Unpack an archive."""
    choose(data, (_unpack, _packed, _settings))


def seeds() -> Sequence[bytes]:
    """An archive with a file, a folder, and links."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, kind, target in (
            ("ISSUED", tarfile.REGTYPE, ""),
            ("tree", tarfile.DIRTYPE, ""),
            ("tree/link", tarfile.SYMTYPE, "../outside"),
            ("tree/hard", tarfile.LNKTYPE, "ISSUED"),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.size = kind, target, 5 if kind == tarfile.REGTYPE else 0
            tar.addfile(entry, io.BytesIO(b"12345"))
    packed = gzip.compress(raw.getvalue(), mtime=0)
    return [chosen(0, packed), chosen(1, raw.getvalue()), chosen(2, b'{"url": "https://a/t.tar.gz"}')]
