"""Facts about the documentation: its Python runs, its names and links exist, the site builds without a warning."""

import importlib
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

import pyro_vsd as vsd

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
READMES = [*sorted(ROOT.glob("benchmarks/**/README.md")), ROOT / "tutorials/README.md"]
TEXTS = [*PAGES, *sorted(DOCS.glob("api/*.md")), *sorted(ROOT.glob("*.md")), *READMES]
FORMULAS = (DOCS / "formulas.md").read_text(encoding="utf-8")
MODULES = [f"pyro_vsd.{info.name}" for info in pkgutil.iter_modules(vsd.__path__) if not info.name.startswith("_")]


def blocks(page):
    """Python between fences, also in lists, with the number of the line it begins at."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^( *)```python\n(.*?)^\1```$", text, flags=re.MULTILINE | re.DOTALL):
        yield text[: match.start(2)].count("\n"), textwrap.dedent(match[2])


def resolve(name):
    """The object of a dotted name: a function before a module of the same name, where there are both."""
    found, path = pkgutil.resolve_name(name.split(".")[0]), name.split(".")[1:]
    try:
        for part in path:
            found = getattr(found, part)
    except AttributeError:
        return pkgutil.resolve_name(name)
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if list(blocks(page))], ids=lambda page: page.stem)
def test_code_of_a_page_runs_from_top_to_bottom(page, monkeypatch, tmp_path):
    plt = pytest.importorskip("matplotlib.pyplot")
    for extra in ("lightning", "mapie", "peft", "sklearn", "transformers"):
        if f"from {extra}" in page.read_text(encoding="utf-8"):
            pytest.importorskip(extra)
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    names: dict = {"__name__": page.stem}
    try:
        for line, code in blocks(page):
            exec(compile("\n" * line + code, str(page), "exec"), names)  # line numbers as in the page
    finally:
        plt.close("all")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_python_escapes(page):
    """What is not meant to run is marked as text: every fence of Python is found by the test above."""
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"```+ *(python|py|pycon|ipython)", text)) == len(list(blocks(page)))


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:pyro_vsd|torch)\.[\w.]+)`", FORMULAS))))
def test_function_of_a_formula_exists(name):
    assert resolve(name).__doc__


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/[^`]+)`", FORMULAS))))
def test_test_of_a_formula_exists(name):
    path, _, function = name.partition("::")
    assert re.search(rf"^def {function}\(", (ROOT / path).read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_tests_of_the_guarantees_exist():
    text = (DOCS / "robustness.md").read_text(encoding="utf-8")
    sources = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    named = re.findall(r"`(?:tests/)?(?:\w+/)*(test_\w+\.py)(?:::(\w+))?", text) + [
        ("", name) for name in re.findall(r"`(test_\w+)`", text)
    ]
    everything = "".join(sources.values())
    assert [pair for pair in named if pair[0] not in ("", *sources)] == []
    assert [pair for pair in named if f"def {pair[1]}" not in everything] == []


FORMULA_ROWS = [line for line in FORMULAS.splitlines() if re.match(r"\| (?!formula \|)", line)]


@pytest.mark.parametrize("row", FORMULA_ROWS)
def test_a_formula_has_a_function_and_a_test(row):
    formula, function, test = (cell.strip() for cell in row.strip("|").split(" | "))
    assert formula
    assert ("`" in function and "`tests/" in test) or function.startswith(("the same function", "not computed"))


@pytest.mark.parametrize("module", MODULES)
def test_every_package_has_a_place_in_the_reference(module):
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("api/*.md"))
    assert f".. automodule:: {module}\n" in pages


def links():
    for text in TEXTS:
        content = re.sub(r"```.*?```", "", text.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in sorted(set(re.findall(r"\]\((?!https?:|#)([^)#\s]+)", content))):
            yield pytest.param(text.parent / target, id=f"{text.relative_to(ROOT)}->{target}")


@pytest.mark.parametrize("target", list(links()))
def test_linked_file_exists(target):
    assert target.exists()


@pytest.mark.parametrize("page", sorted(DOCS.glob("*_evidence.md")), ids=lambda page: page.stem)
def test_advice_links_to_its_evidence(page):
    """A page of measurements stands behind a page of advice; each links to the other."""
    name = page.name.replace("_evidence", "").replace("ensembles", "choosing")
    advice = (ROOT / "benchmarks/README.md" if name == "benchmarks.md" else DOCS / name).read_text(encoding="utf-8")
    assert page.name in advice
    assert f"({name})" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_of_prose_have_at_most_120_characters(page):
    prose = re.sub(r"```.*?```|\$\$.*?\$\$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [line for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_line_begins_with_a_per_cent_sign(page):
    """The site takes such a line for a comment and leaves it out."""
    assert not re.findall(r"^ *% .*", page.read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_code_fit_a_window_of_1300_pixels(page):
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^( *)```[^`\n]*\n(.*?)^\1```$", text, flags=re.MULTILINE | re.DOTALL)
    assert [line for _, code in fences for line in code.splitlines() if len(line) > 120] == []


@pytest.fixture
def extension(monkeypatch):
    """Imports one of the site's own extensions."""
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    return importlib.import_module


def test_every_plot_has_a_picture(extension):
    plots = pytest.importorskip("pyro_vsd.plots")
    drawn = {picture.__name__ for picture in extension("pictures").PLOTS}
    assert drawn == set(plots.__all__) - {"droprates"}  # an old name


@pytest.mark.parametrize("notebook", sorted(ROOT.glob("tutorials/*.ipynb")), ids=lambda path: path.stem)
def test_notebook_has_a_card_in_the_gallery(notebook, extension):
    gallery = extension("gallery")
    title, text = gallery.introduction(notebook)
    assert title[0].isdigit()
    assert text.endswith((".", "?", "!"))
    assert gallery.picture(notebook).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("link", "source", "page"),
    [
        ("../README.md", "benchmarks/paper/README.md", "benchmarks.md"),
        ("peers/README.md", "benchmarks/README.md", "benchmarks_peers.md"),
        ("../../docs/rotation.md#which", "benchmarks/paper/README.md", "rotation.md#which"),
        ("../results", "benchmarks/paper/README.md", None),
    ],
)
def test_links_of_a_copied_page_lead_to_pages(link, source, page, extension):
    assert extension("repository_pages").target(link, source) == page


def documented_objects(inventory):
    """Modules, classes, functions and constants in the site's index, by identity."""
    content = inventory.read_bytes().split(b"\n", 4)[4]  # four lines of text, then compressed ones
    entries = [line.split(" ") for line in zlib.decompress(content).decode().splitlines()]
    kinds = ("py:module", "py:class", "py:function", "py:data")
    return {id(resolve(name)) for name, kind, *_ in entries if kind in kinds}


@pytest.mark.slow
def test_site_builds_without_a_warning_and_holds_every_public_name(tmp_path):
    for name in ("myst_nb", "lightning", "sklearn", "transformers"):
        pytest.importorskip(name)
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    for notebook in (ROOT / "tutorials").glob("*.ipynb"):
        assert (tmp_path / "tutorials" / f"{notebook.stem}.html").exists()
    pages = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    remote = re.compile(r'<(script|link|img)[^>]*(src|href)="(https?:)?//')
    assert [path for path, html in pages.items() if remote.search(html)] == []
    assert 'src="_static/tex-svg.js' in pages[tmp_path / "method.html"]
    local = {(path, href) for path, html in pages.items() for href in re.findall(r'href="(?!\w+:|#)([^"#?]+)', html)}
    assert [(path.name, href) for path, href in local if not (path.parent / unquote(href)).exists()] == []
    documented = documented_objects(tmp_path / "objects.inv")
    public = [(module, name) for module in ["pyro_vsd", *MODULES] for name in importlib.import_module(module).__all__]
    assert [f"{m}.{n}" for m, n in public if id(getattr(importlib.import_module(m), n)) not in documented] == []
