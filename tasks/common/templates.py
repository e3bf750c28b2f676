"""Renders templates on the control host. (pyinfra's `files.template` renders those that are uploaded directly.)"""

from __future__ import annotations

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from agent.report.names import TAINT
from tasks.common import archive
from tasks.common.texts import HEADER


def render(name: str, **values: object) -> str:
    """Render a template. A missing value is an error."""
    environment = Environment(
        loader=FileSystemLoader(archive.ROOT / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  no markup
    )
    # Globals, since a template that is imported by another one sees no values.
    environment.globals.update(header=HEADER.rstrip("\n"), taint=TAINT)
    return environment.get_template(name).render(**values)
