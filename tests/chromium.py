"""Shows a page in headless Chromium."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.parse
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Literal

import cattrs
import numpy as np
from attrs import frozen
from matplotlib.image import imread

from tests.debian import program

Scheme = Literal["light", "dark"]
SCHEMES = {"dark": 0, "light": 1}
"""Chromium's numbers of what a page may ask for by prefers-color-scheme."""

WIDTH = 1280
"""Pixels of the window."""

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
    """Show a page of this machine."""
    picture, log = folder / f"{page.stem}-{scheme}.png", folder / "network.json"
    _chromium(page, scheme, folder, f"--log-net-log={log}", f"--screenshot={picture}")
    events = json.loads(log.read_text())["events"]
    return Shown(picture, frozenset(each["params"]["url"] for each in events if "url" in each.get("params", {})))


def _chromium(page: Path, scheme: Scheme, folder: Path, *options: str) -> str:
    path, environment = program("chromium-headless-shell", "usr/lib/chromium/chromium-headless-shell")
    command = [
        str(path),
        # A test may run as root, which has no sandbox.
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        f"--window-size={WIDTH},2600",
        *options,
        page.as_uri(),
    ]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=DEADLINE)
    return done.stdout.decode()


# --- what can be read ---------------------------------------------------------------------------------------

# Of each element with text of its own: the box, the size of its letters on the screen, and the colour. SVG may be scaled.
MEASURE = """<script>
const texts = [];
for (const each of document.querySelectorAll("WITHIN")) {
  const words = [...each.childNodes].filter(node => node.nodeType === 3).map(node => node.data.trim()).join(" ").trim();
  const box = each.getBoundingClientRect(), style = getComputedStyle(each);
  if (!words || !box.width || each.closest("script, style, metadata")) continue;
  const picture = each.ownerSVGElement, matrix = picture && each.getScreenCTM();
  const area = picture && picture.getBoundingClientRect();
  texts.push({
    words, left: box.left, top: box.top, right: box.right, bottom: box.bottom,
    size: parseFloat(style.fontSize) * (matrix ? Math.hypot(matrix.a, matrix.b) : 1),
    ink: picture ? style.fill : style.color,
    picture: picture ? [...document.querySelectorAll("svg")].indexOf(picture) : -1,
    cut: !!area && (box.left < area.left - 1 || box.right > area.right + 1
      || box.top < area.top - 1 || box.bottom > area.bottom + 1),
  });
}
document.documentElement.dataset.measured = encodeURIComponent(JSON.stringify({
  texts, paper: getComputedStyle(document.body).backgroundColor, width: document.documentElement.scrollWidth,
}));
</script>"""

LEAST_SIZE = 9.0
"""Pixels: the height of the smallest letters."""

LEAST_CONTRAST = 4.5
"""Between text and page, as WCAG 2 defines it and asks for (level AA)."""


@frozen
class Text:
    """A text as a page shows it. ``size``: of its letters, in pixels. ``picture``: the number of its SVG image; -1 outside."""

    words: str
    left: float
    top: float
    right: float
    bottom: float
    size: float
    ink: str
    picture: int
    cut: bool

    def overlaps(self, other: Text) -> bool:
        """Whether they share more than a pixel in each direction."""
        across = min(self.right, other.right) - max(self.left, other.left)
        return across > 1 and min(self.bottom, other.bottom) - max(self.top, other.top) > 1


@frozen
class Measured:
    """What a page shows. ``width``: of all its content, in pixels. ``paper``: the colour behind it."""

    texts: Sequence[Text]
    paper: str
    width: float


def illegible(page: Path, scheme: Scheme, folder: Path, within: str = "body *") -> list[str]:
    """Why a page of this machine cannot be read in a window that is :data:`WIDTH` pixels wide, or which of its texts cannot.

    ``within``: a CSS selector of the elements whose texts are judged.
    """
    # The page's own policy lets no script run, so a copy without it is measured.
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    copy = page.with_name(f"{page.stem}-{scheme}.html")  # beside the page, as its links are relative
    copy.write_text(text.replace("</body>", f"{MEASURE.replace('WITHIN', within)}</body>"))
    (answer,) = re.findall(r'data-measured="([^"]+)"', _chromium(copy, scheme, folder, "--dump-dom"))
    copy.unlink()
    seen = cattrs.structure(json.loads(urllib.parse.unquote(answer)), Measured)
    assert seen.texts
    return list(_faults(seen))


def _faults(seen: Measured) -> Iterator[str]:
    if seen.width > WIDTH:
        yield f"the page is {seen.width:.0f} pixels wide"
    for text in seen.texts:
        if text.size < LEAST_SIZE:
            yield f"{text.words!r} is {text.size:.1f} pixels high"
        if (found := contrast(text.ink, seen.paper)) < LEAST_CONTRAST:
            yield f"{text.words!r} has a contrast of {found:.1f}"
        if text.cut:
            yield f"{text.words!r} is not all in its picture"
    for one, other in combinations([text for text in seen.texts if text.picture >= 0], 2):
        if one.picture == other.picture and one.overlaps(other):
            yield f"{one.words!r} is over {other.words!r}"


def contrast(ink: str, paper: str) -> float:
    """The contrast of two colours that are written as Chromium does: rgb(1, 2, 3) or rgba(1, 2, 3, 0.4)."""
    background = _channels(paper)[:3]
    *colour, opacity = _channels(ink)
    seen = [each * opacity + below * (1 - opacity) for each, below in zip(colour, background, strict=True)]
    darker, lighter = sorted((_luminance(seen), _luminance(background)))
    return (lighter + 0.05) / (darker + 0.05)


def _channels(colour: str) -> list[float]:
    red, green, blue, *opacity = map(float, re.findall(r"[\d.]+", colour))
    return [red, green, blue, *(opacity or [1.0])]


def _luminance(colour: Sequence[float]) -> float:
    shares = [each / 255 for each in colour]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
