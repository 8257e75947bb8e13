"""The tutorials as pages, and as a gallery: cards with a title, some words and a picture, read from the notebooks."""

import base64
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "tutorials"
MARK = "<!-- gallery -->"

CARD = """:::{{grid-item-card}} {title}
:link: tutorials/{name}
:link-type: doc
:img-top: {picture}
:class-img-top: thumbnail

{text}
:::
"""


def write(path: Path, content: bytes) -> None:
    """Writes what is new; an unchanged file keeps its time, so that Sphinx does not read it again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)


def cells(notebook: Path) -> list[dict[str, Any]]:
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


def introduction(notebook: Path) -> tuple[str, str]:
    """The title, and the first sentences of the text below it."""
    text = "".join("".join(cell["source"]) + "\n\n" for cell in cells(notebook) if cell["cell_type"] == "markdown")
    found = re.match(r"\s*# (?P<title>.+)\n+(?P<text>[^#\n](?:.|\n(?!\n))+)", text)
    if not found:
        raise ValueError(f"{notebook.name} must begin with a title and a paragraph.")
    # whole sentences: one that a formula continues is left out
    sentences = re.findall(r"\S.*?[.?!](?= |$)", " ".join(found["text"].split()))
    text = sentences.pop(0)
    while sentences and len(text) < 100:
        text += " " + sentences.pop(0)
    return found["title"], text


def picture(notebook: Path) -> bytes:
    """The first figure among the outputs."""
    for cell in cells(notebook):
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                return base64.b64decode("".join(output["data"]["image/png"]))
    raise ValueError(f"{notebook.name} has no figure to show in the gallery.")


def gallery(notebooks: list[Path]) -> str:
    """Cards of the notebooks, in the order of their names."""
    cards = []
    for notebook in notebooks:
        title, text = introduction(notebook)
        shown = f"/tutorials/thumbnails/{notebook.stem}.png"
        cards.append(CARD.format(title=title, name=notebook.stem, picture=shown, text=text))
    return "::::{grid} 1 2 2 2\n:gutter: 3\n\n" + "\n".join(cards) + "::::\n"


def copy_notebooks(app: Any) -> None:
    """Brings the notebooks and their thumbnails below ``docs``, where Sphinx looks."""
    notebooks = sorted((ROOT / "tutorials").glob("*.ipynb"))
    for path in PAGES.rglob("*.*"):
        if path.stem not in {notebook.stem for notebook in notebooks}:
            path.unlink()
    for notebook in notebooks:
        write(PAGES / notebook.name, notebook.read_bytes())
        write(PAGES / "thumbnails" / f"{notebook.stem}.png", picture(notebook))


def page_of(match: re.Match[str]) -> str:
    """``tutorial:regression`` is the page of that notebook, whatever its number."""
    (found,) = PAGES.glob(f"[0-9]*_{match[1]}.ipynb")
    return f"tutorials/{found.stem}"


def fill_page(app: Any, docname: str, source: list[str]) -> None:
    if MARK in source[0]:
        source[0] = source[0].replace(MARK, gallery(sorted(PAGES.glob("*.ipynb"))))
    source[0] = re.sub(r"(?<=:link: )tutorial:(\w+)", page_of, source[0])


def setup(app: Any) -> dict[str, bool]:
    # before myst-nb and Sphinx look for files
    copy_notebooks(app)
    app.connect("source-read", fill_page)
    return {"parallel_read_safe": True}
