"""Texts made of templates/ on the control host; `files.template` makes those that go to nodes as they are."""

from __future__ import annotations

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tasks.common import archive


def render(name: str, **values: object) -> str:
    """A template's text; a value that is missing is an error."""
    environment = Environment(
        loader=FileSystemLoader(archive.ROOT / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  no markup
    )
    return environment.get_template(name).render(**values)
