"""``python -m benchmarks.paper``: run, tune, list, tables, figures."""

import argparse
import os
import tempfile
from pathlib import Path

from benchmarks.paper import options_tables, rotation_tables, runner, store, tables
from benchmarks.paper.registry import AT_HAND, SETTINGS
from benchmarks.paper.unit import Setting


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description="The paper's experiments.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("run", "run what is missing"), ("list", "show what is done"), ("tune", "search")):
        command = commands.add_parser(name, help=text)
        _selection(command)
        if name == "tune":
            _running(command)
            command.add_argument("--trials", type=int, default=10)
            command.add_argument("--epochs", type=int, default=6, help="of a trial")
        if name == "run":
            _running(command)
            command.add_argument("--jobs", type=int, default=1, help="processes")
            command.add_argument("--device", default="cpu", help="such as cuda:0")
            command.add_argument("--smoke", action="store_true", help="a few steps on random images; nothing is kept")
    command = commands.add_parser("tables", help="print the tables as Markdown")
    command.add_argument("--results", type=Path, default=store.RESULTS, help="folder of the JSON files")
    command.add_argument("--write", action="store_true", help="into their pages, in place of printing")
    command = commands.add_parser("figures", help="draw the figures")
    command.add_argument("--results", type=Path, default=store.RESULTS, help="folder of the JSON files")
    command.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    return parser


def _selection(command: argparse.ArgumentParser) -> None:
    command.add_argument("--task", nargs="+", default=AT_HAND, choices=list(SETTINGS), metavar="TASK")
    command.add_argument("--only", nargs="+", default=[], metavar="VARIANT")
    command.add_argument("--seeds", nargs="+", type=int, default=[], metavar="SEED")
    command.add_argument("--results", type=Path, default=store.RESULTS, help="folder of the JSON files")


def _running(command: argparse.ArgumentParser) -> None:
    folder = os.environ.get("PYRO_VSD_DATA")
    command.add_argument("--data", type=Path, default=Path(folder) if folder else None, help="or PYRO_VSD_DATA")
    work = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pyro_vsd"
    command.add_argument("--work", type=Path, default=work, help="checkpoints and searches, outside the repository")


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.command == "tables":
        if arguments.write:
            for module in (tables, rotation_tables, options_tables):
                module.write(arguments.results)
        else:
            print(*(m.render(arguments.results) for m in (tables, rotation_tables, options_tables)), sep="\n\n")
        return
    if arguments.command == "figures":
        from benchmarks.paper import figures, rotation_figures  # matplotlib takes a second to import

        for module in (figures, rotation_figures):
            print(*module.draw(arguments.out, arguments.results), sep="\n")
        return
    units = runner.selected(arguments.task, arguments.only, arguments.seeds)
    if arguments.command == "run" and arguments.smoke:
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder)
            runner.run(
                units, here / "results", arguments.data, here, arguments.jobs, device=arguments.device, smoke=True
            )
    elif arguments.command == "run":
        runner.run(units, arguments.results, arguments.data, arguments.work, arguments.jobs, device=arguments.device)
    elif arguments.command == "tune":
        from benchmarks.paper.tune import tune  # Optuna takes a second to import

        for unit in {(unit.task, unit.variant): unit for unit in units}.values():
            # the UCI sets tune inside their units
            own = isinstance(unit.setting, Setting) and unit.setting.tuned_as is None
            if own and unit.setting.variants[unit.variant].tuned:
                chosen = tune(unit.setting, unit.variant, arguments.data, arguments.work, arguments.results,
                              arguments.trials, arguments.epochs)["chosen"]  # fmt: skip
                print(f"{unit.task}/{unit.variant}: {chosen}", flush=True)
    elif arguments.command == "list":
        open_units = {unit.name for unit in runner.missing(units, arguments.results)}
        for unit in units:
            print("missing" if unit.name in open_units else "done   ", unit.name)
        print(f"{len(units) - len(open_units)} of {len(units)} done")


if __name__ == "__main__":
    main()
