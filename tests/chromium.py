"""Shows a page in headless Chromium."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Literal

import numpy as np
from attrs import frozen
from matplotlib.image import imread

from tests.debian import program

Scheme = Literal["light", "dark"]
SCHEMES = {"dark": 0, "light": 1}
"""Chromium's numbers of what a page may ask for by prefers-color-scheme."""

DEADLINE = 120.0
"""Seconds. For hangs, not for speed."""


@frozen
class Shown:
    """A shown page: its picture, and all URLs that the browser has requested besides the file itself."""

    picture: Path
    asked: frozenset[str]

    def colours(self) -> set[str]:
        """The colours that cover at least a few letters' area, as #rrggbb."""
        pixels = np.rint(imread(self.picture)[:, :, :3] * 255).astype(np.uint8).reshape(-1, 3)
        colours, counts = np.unique(pixels, axis=0, return_counts=True)
        return {
            f"#{red:02x}{green:02x}{blue:02x}"
            for (red, green, blue), count in zip(colours, counts, strict=True)
            if count > 50
        }


def shown(page: Path, scheme: Scheme, folder: Path) -> Shown:
    """Show a page of this machine, 1,320 pixels wide."""
    path, environment = program("chromium-headless-shell", "usr/lib/chromium/chromium-headless-shell")
    picture, log = folder / f"{page.stem}-{scheme}.png", folder / "network.json"
    command = [
        str(path),
        # A test may run as root, which has no sandbox.
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        "--window-size=1320,2600",
        f"--log-net-log={log}",
        f"--screenshot={picture}",
        page.as_uri(),
    ]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=DEADLINE)
    events = json.loads(log.read_text())["events"]
    return Shown(picture, frozenset(each["params"]["url"] for each in events if "url" in each.get("params", {})))
