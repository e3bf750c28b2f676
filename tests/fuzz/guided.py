"""One target under atheris; tests/fuzz/__main__.py starts it."""

from __future__ import annotations

import importlib
import sys

import atheris

with atheris.instrument_imports(include=["agent", "cli", "fleet", "tasks", "h2", "hpack", "hyperframe", "cattrs"]):
    CHECK = importlib.import_module(f"tests.fuzz.targets.{sys.argv[1]}").check

atheris.Setup([sys.argv[0], *sys.argv[2:]], CHECK)
atheris.Fuzz()
