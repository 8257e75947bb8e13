"""``python -m benchmarks.paper``: run, tune, list, tables, figures."""

import argparse
import os
import tempfile
from pathlib import Path

from benchmarks.paper import options_tables, rotation_tables, runner, store, summary_tables, tables
from benchmarks.paper.registry import AT_HAND, SETTINGS
from benchmarks.paper.unit import Setting, Unit

#: each makes the tables of a page
PAGES = (tables, rotation_tables, options_tables, summary_tables)
_ROOT = Path(__file__).resolve().parents[2]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description="The paper's experiments.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("run", "run what is missing"), ("list", "show what is done"), ("tune", "search")):
        command = commands.add_parser(name, help=text)
        _selection(command)
        if name == "tune":
            _running(command)
            command.add_argument("--trials", type=_positive, default=10)
            command.add_argument("--epochs", type=_positive, default=6, help="of a trial")
        if name == "run":
            _running(command)
            command.add_argument("--jobs", type=_positive, default=1, help="processes")
            command.add_argument("--device", default="cpu", help="such as cuda:0")
            command.add_argument("--smoke", action="store_true", help="a few steps on random images; nothing is kept")
    command = commands.add_parser("tables", help="print the tables as Markdown")
    command.add_argument("--results", type=Path, default=store.RESULTS, help="folder of the JSON files")
    command.add_argument("--write", action="store_true", help="into their pages, in place of printing")
    command = commands.add_parser("figures", help="draw the figures")
    command.add_argument("--results", type=Path, default=store.RESULTS, help="folder of the JSON files")
    command.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def _selection(command: argparse.ArgumentParser) -> None:
    others = [task for task in SETTINGS if task not in AT_HAND]
    names = f"{', '.join(AT_HAND)} (these by default); {', '.join(others)}"
    command.add_argument("--task", nargs="+", default=AT_HAND, choices=list(SETTINGS), metavar="TASK", help=names)
    command.add_argument("--only", nargs="+", default=[], metavar="VARIANT", help="as list shows them")
    command.add_argument("--seeds", nargs="+", type=int, default=[], metavar="SEED")
    command.add_argument("--results", type=Path, default=store.RESULTS, help="folder of the JSON files")


def _running(command: argparse.ArgumentParser) -> None:
    folder = os.environ.get("PYRO_VSD_DATA")
    command.add_argument("--data", type=Path, default=Path(folder) if folder else None, help="or PYRO_VSD_DATA")
    work = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pyro_vsd"
    command.add_argument("--work", type=Path, default=work, help="checkpoints and searches, outside the repository")


def main() -> None:
    arguments = _parser().parse_args()
    _COMMANDS[arguments.command](arguments)


def _units(arguments: argparse.Namespace) -> list[Unit]:
    try:
        return runner.selected(arguments.task, arguments.only, arguments.seeds)
    except ValueError as error:
        raise SystemExit(str(error)) from None


def _tables(arguments: argparse.Namespace) -> None:
    """All pages or none, and none without its results."""
    made = {module: module.render(arguments.results) for module in PAGES}
    empty = [str(module.PAGE.relative_to(_ROOT)) for module, text in made.items() if not text]
    if len(empty) == len(made) or (arguments.write and empty):
        raise SystemExit(f"results: expected those of {', '.join(empty)} in {arguments.results}, got none.")
    if not arguments.write:
        print(*made.values(), sep="\n\n")
        return
    for module, text in made.items():
        tables.rebuild(module.PAGE, text)
        print(f"wrote {module.PAGE}")


def _figures(arguments: argparse.Namespace) -> None:
    from benchmarks.paper import figures, rotation_figures  # matplotlib takes a second to import

    made = [path for module in (figures, rotation_figures) for path in module.draw(arguments.out, arguments.results)]
    if not made:
        raise SystemExit(f"results: expected some in {arguments.results}, got none.")
    print(*made, sep="\n")


def _run(arguments: argparse.Namespace) -> None:
    units = _units(arguments)
    with tempfile.TemporaryDirectory() as folder:
        results, work, how = arguments.results, arguments.work, {"device": arguments.device}
        if arguments.smoke:
            results, work, how = Path(folder) / "results", Path(folder), how | {"smoke": True}
        runner.run(units, results, arguments.data, work, arguments.jobs, **how)


def _tune(arguments: argparse.Namespace) -> None:
    from benchmarks.paper.tune import tune  # Optuna takes a second to import

    units = _units(arguments)
    searched = [unit for unit in {(unit.task, unit.variant): unit for unit in units}.values() if _has_search(unit)]
    if not searched:
        raise SystemExit(f"only: expected variants with a search, got {', '.join(arguments.only) or 'none'}.")
    for unit in searched:
        chosen = tune(unit.setting, unit.variant, arguments.data, arguments.work, arguments.results,
                      arguments.trials, arguments.epochs)["chosen"]  # fmt: skip
        print(f"{unit.task}/{unit.variant}: {chosen}", flush=True)


def _has_search(unit: Unit) -> bool:
    """The UCI sets tune inside their units."""
    own = isinstance(unit.setting, Setting) and unit.setting.tuned_as is None
    return own and bool(unit.setting.variants[unit.variant].tuned)


def _list(arguments: argparse.Namespace) -> None:
    units = _units(arguments)
    missing = {unit.name for unit in runner.missing(units, arguments.results)}
    for unit in units:
        print("missing" if unit.name in missing else "done   ", unit.name)
    print(f"{len(units) - len(missing)} of {len(units)} done")


_COMMANDS = {"run": _run, "list": _list, "tune": _tune, "tables": _tables, "figures": _figures}


if __name__ == "__main__":
    main()
