"""Looks up known vulnerabilities of the locked packages: `python -m tasks.common.audit requirements/*.txt`.

The package registry's JSON API lists the entries of the Python Packaging Advisory Database and OSV for each version
(docs.pypi.org/api/json). Each pin is one request; no package is downloaded.
"""

from __future__ import annotations

import http.client
import json
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import click
from attrs import frozen
from packaging.requirements import Requirement

from agent.documents import load

REGISTRY = "https://pypi.org/pypi"
TIMEOUT = 30.0
LARGEST = 64 << 20
GONE = 404


class NoAnswer(Exception):
    """The registry gave no usable answer; the message says why."""


@frozen
class Pin:
    """A package and its pinned version."""

    name: str
    version: str


@frozen
class Finding:
    """A known vulnerability of a pin. ``fixed``: the versions without it."""

    pin: Pin
    what: str
    summary: str = ""
    fixed: tuple[str, ...] = ()

    def __str__(self) -> str:
        fixed = f"; fixed in {', '.join(self.fixed)}" if self.fixed else ""
        return f"{self.pin.name} {self.pin.version}: {self.what}{': ' if self.summary else ''}{self.summary}{fixed}"


def pins(lock: Path) -> Iterator[Pin]:
    """The pins of a lock file, whatever the machine they are for.

    :raises ValueError: a line is not `NAME==VERSION`, or the file is not text.
    """
    for line in lock.read_text().replace("\\\n", " ").splitlines():
        text = line.split("--hash=")[0].strip()
        if text and not text.startswith("#"):
            requirement = Requirement(text)
            version = str(requirement.specifier).removeprefix("==")
            if not version or str(requirement.specifier) != f"=={version}":
                raise ValueError(f"{text[:80]!r} pins no version; write it as NAME==VERSION")
            yield Pin(requirement.name, version)


def findings(pin: Pin, registry: str = REGISTRY) -> list[Finding]:
    """The known vulnerabilities of a pin.

    :raises NoAnswer: the registry does not answer, or with something else than this API.
    """
    document = _fetch(f"{registry}/{pin.name}/{pin.version}/json")
    if document is None:
        # A mirror may serve only the newest version.
        document = _fetch(f"{registry}/{pin.name}/json")
        if document is None or document.get("info", {}).get("version") != pin.version:
            return [Finding(pin, "the registry does not have this version")]
    try:
        known = [entry for entry in document["vulnerabilities"] if not entry.get("withdrawn")]
        return [
            Finding(pin, str(entry["id"]), str(entry.get("summary") or ""), tuple(entry.get("fixed_in") or ()))
            for entry in known
        ]
    except (LookupError, TypeError, AttributeError) as error:
        raise NoAnswer(f"{registry} has no data on vulnerabilities of {pin.name}: {error!r}") from None


def _fetch(url: str) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:  # noqa: S310  the scheme is REGISTRY's
            document = load(answer.read(LARGEST), LARGEST)
    except HTTPError as error:
        if error.code == GONE:
            return None
        raise NoAnswer(f"{url} does not answer: {error}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoAnswer(
            f"{url} does not answer: {getattr(error, 'reason', error)}; this check needs the network"
        ) from None
    return document if isinstance(document, dict) else None


@click.command()
@click.argument("locks", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--registry", default=REGISTRY, show_default=True, help="Base URL of the JSON API.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def main(locks: Iterable[Path], registry: str, as_json: bool) -> None:
    """Print the known vulnerabilities of what LOCKS pin.

    Exit code: 0 none is known, 1 the registry does not answer, 2 some are known, or a version is unknown there.
    """
    found = set()
    for lock in locks:
        try:
            found |= set(pins(lock))
        except (OSError, ValueError) as error:
            raise click.ClickException(f"{lock} is not a lock file: {error}") from None
    wanted = sorted(found, key=lambda pin: (pin.name, pin.version))
    try:
        all_findings = [finding for pin in wanted for finding in findings(pin, registry)]
    except NoAnswer as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        plain = [
            {"name": f.pin.name, "version": f.pin.version, "what": f.what, "fixed": list(f.fixed)} for f in all_findings
        ]
        click.echo(json.dumps({"pins": len(wanted), "findings": plain}))
    else:
        for finding in all_findings:
            click.echo(str(finding))
        click.echo(f"{len(wanted)} pins, {len(all_findings)} findings")
    sys.exit(2 if all_findings else 0)


if __name__ == "__main__":
    main()
