"""Functions that MkDocs calls while it builds the site (mkdocs.yml): they add pages and facts from the code."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from handbook import campaign, commands, conditions, metrics, pictures, spec, trials, zoo

ROOT = Path(__file__).parents[1]

FROM_THE_CODE: Mapping[str, Callable[..., str]] = {
    "checks": conditions.checks,
    "commands": commands.page,
    "conditions": conditions.page,
    "fabric_picture": pictures.fabric,
    "fleet_pictures": pictures.fleet,
    "keys": spec.section,
    "metrics": metrics.page,
    "runs": campaign.runs,
    "spec": spec.page,
    "terminal": pictures.terminal,
    "trials": lambda name: trials.TABLES[name](trials.load(campaign.DOCS)),
    "zoo": zoo.made,
}
"""By NAME: the function whose text replaces the lines from `<!-- from the code: NAME WORD -->` to `<!-- end -->` in a page.
It gets WORD, if there is one. Its links lead from docs/."""

OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
"""Pages of the repository that are not in docs/, and their names in the site."""

MARK = re.compile(r"<!-- from the code: (\w+)((?: \w+)?) -->\n.*?<!-- end -->\n", re.DOTALL)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
PICTURE = re.compile(r'(?<=src=")docs/')

FROM_A_GUIDE = re.compile(r"\]\(\.\./([\w/]+\.md)")
"""A link of a page in docs/ to a page outside it."""

DECISIONS = "decisions/index.md"

PICTURES = "pictures.css"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation: each decision, and pages that mkdocs.yml does not name."""
    docs = Path(config.docs_dir)
    nav: list[Any] = config.nav or []
    named = set(_leaves(nav))
    for page in sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md")):
        if page not in named:
            _section(nav, "Decisions" if page.startswith("decisions/") else "Guides").append(page)
    config.extra_css.append(PICTURES)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, the list of decisions, and the style of pictures."""
    for source, page in OUTSIDE.items():
        text = LINK.sub(lambda match, source=source: _link(match, source), (ROOT / source).read_text())  # type: ignore[misc]
        files.append(File.generated(config, page, content=PICTURE.sub("", text)))
    titles = {path.name: path.read_text().partition("\n")[0].lstrip("# ") for path in _decisions(config)}
    listed = "".join(f"- [{title}]({name})\n" for name, title in titles.items())
    files.append(File.generated(config, DECISIONS, content=f"# Decisions\n\n{listed}"))
    files.append(File.generated(config, PICTURES, content=pictures.STYLE))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in facts and pictures from the code. Links to the folder of decisions and out of docs/ lead to their pages."""
    linked = FROM_A_GUIDE.sub(
        lambda match: f"]({OUTSIDE.get(match[1], f'../{match[1]}')}",
        markdown.replace("](decisions/)", f"]({DECISIONS})"),
    )
    return MARK.sub(lambda match: _linked(FROM_THE_CODE[match[1]](*match[2].split()), page.file.src_uri), linked)


def _decisions(config: MkDocsConfig) -> list[Path]:
    return sorted((Path(config.docs_dir) / "decisions").glob("*.md"))


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for each in (*nav.values(),) if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _leaves(each)


def _section(nav: list[Any], title: str) -> list[Any]:
    section: list[Any] = next(each[title] for each in nav if isinstance(each, dict) and title in each)
    return section


def _linked(text: str, page: str) -> str:
    """A text with links from docs/, as they must be in the page."""
    folder = posixpath.dirname(page)
    return LINK.sub(lambda match: f"[{match[1]}]({posixpath.relpath(match[2], folder)}{match[3] or ''})", text)


def _link(match: re.Match[str], source: str) -> str:
    """A link of a page outside docs/, as it must be in the site; only its text if the site lacks the target."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
    if target == "docs/decisions":
        page = DECISIONS
    elif target.startswith("docs/"):
        page = target.removeprefix("docs/")
    elif target in OUTSIDE:
        page = OUTSIDE[target]
    else:
        return match[1]
    return f"[{match[1].removeprefix('docs/')}]({page}{match[3] or ''})"
