"""Files of public Go modules, as the Go module proxy has them: the schemas to hold manifests against."""

import json
import os
import zipfile
from pathlib import Path

from lab.command import run
from lab.go import go_programs

# Kept by version and outside the checkout, whatever cache the session has.
KEPT = Path.home() / ".cache" / "trackbed" / "go-modules"


def file(module: str, version: str, path: str) -> Path:
    """A file of a module, checked against Go's public checksum database when it is fetched, which is once for a version."""
    kept = KEPT / f"{module}@{version}" / path
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        fetched = json.loads(run([go_programs.go(), "mod", "download", "-json", f"{module}@{version}"]))
        with zipfile.ZipFile(fetched["Zip"]) as opened:
            new = kept.with_suffix(f".{os.getpid()}.new")
            new.write_bytes(opened.read(f"{module}@{version}/{path}"))
            new.replace(kept)
    return kept
