"""Writes container images as OCI archives of one layer, without a registry."""

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import attrs

REGISTRY = "trackbed.internal/lab"
"""There is no such host, so an image must already be on the node."""

# GOMAXPROCS: threads that spin while they wait for each other are slow on an emulated machine.
ENVIRONMENT = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "GOMAXPROCS=1"]


@attrs.frozen
class Image:
    """An image's content: files of this host by their paths in the image, links, and empty folders."""

    name: str
    entrypoint: Sequence[str]
    files: Mapping[str, Path] = attrs.field(factory=dict)
    links: Mapping[str, str] = attrs.field(factory=dict)
    folders: Sequence[str] = ()

    @property
    def reference(self) -> str:
        """The image's name in a pod's manifest."""
        return f"{REGISTRY}/{self.name}"

    def write(self, archive: Path) -> None:
        """Write the archive that `ctr -n k8s.io images import` reads."""
        layer = self._layer()
        config = _json(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {"Entrypoint": list(self.entrypoint), "Env": ENVIRONMENT},
                "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
            }
        )
        manifest = _json(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
                "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar", layer)],
            }
        )
        listed = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest)
        listed["annotations"] = {"io.containerd.image.name": self.reference}
        with tarfile.open(archive, "w") as out:
            _add(out, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
            _add(out, "index.json", _json({"schemaVersion": 2, "manifests": [listed]}))
            for blob in (config, layer, manifest):
                _add(out, f"blobs/{_digest(blob).replace(':', '/')}", blob)

    def _layer(self) -> bytes:
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as out:
            for folder in self.folders:
                entry = tarfile.TarInfo(folder)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                out.addfile(entry)
            for path, target in self.links.items():
                entry = tarfile.TarInfo(path)
                entry.type, entry.linkname = tarfile.SYMTYPE, target
                out.addfile(entry)
            for path, file in self.files.items():
                _add(out, path, file.read_bytes(), 0o755)
        return content.getvalue()


def _add(out: tarfile.TarFile, path: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = len(content), mode
    out.addfile(entry, io.BytesIO(content))


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{sha256(blob).hexdigest()}"


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document).encode()
