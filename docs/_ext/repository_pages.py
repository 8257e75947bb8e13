"""Pages of the site whose text stands elsewhere in the repository; their links lead to pages of the site."""

import os.path
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# page: source
PAGES = {
    "benchmarks": "benchmarks/README.md",
    "benchmarks_paper": "benchmarks/paper/README.md",
    "benchmarks_peers": "benchmarks/peers/README.md",
    "changelog": "CHANGELOG.md",
}


def target(link: str, source: str) -> str | None:
    """Where a link of ``source`` leads on the site; None where the site has no such page."""
    path, _, anchor = link.partition("#")
    path = os.path.normpath(os.path.join(os.path.dirname(source), path))
    pages = {text: f"{page}.md" for page, text in PAGES.items()}
    page = pages.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
    return page and page + ("#" + anchor if anchor else "")


def page_text(source: str) -> str:
    """The text of ``source``; links to files that are no pages become plain text."""

    def relink(match: re.Match[str]) -> str:
        new = target(match[2], source)
        return f"[{match[1]}]({new})" if new else match[1]

    text = (ROOT / source).read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)", relink, text)


def fill_page(app: Any, docname: str, content: list[str]) -> None:
    if docname in PAGES:
        app.env.note_dependency(str(ROOT / PAGES[docname]))
        content[0] = page_text(PAGES[docname])


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", fill_page)
    return {"parallel_read_safe": True}
