"""All tasks by name: the settings, and the module that runs each.

A file of settings has a list ``SETTINGS``, each with ``task``, ``module`` and ``variants``.
"""

import importlib
from typing import Any

from benchmarks.paper.settings import cifar, deep, digits, mnist, options, rotation, uci
from benchmarks.paper.unit import Unit

__all__ = ["AT_HAND", "SETTINGS", "module_of", "units_of"]

#: by task
SETTINGS: dict[str, Any] = {
    setting.task: setting
    for settings in (mnist, cifar, uci, rotation, options, deep, digits)
    for setting in settings.SETTINGS
}


#: tasks that a CPU can do, with data that are easily at hand: what runs where none are named
AT_HAND = [
    setting.task
    for settings in (mnist, cifar, uci, rotation, options)
    for setting in settings.SETTINGS
    if setting.data != "svhn"
]


def module_of(unit: Unit) -> Any:
    """The task module that runs a unit."""
    return importlib.import_module(unit.module)


def units_of(task: str) -> list[Unit]:
    """The units of a task, in the order in which they are run."""
    if task not in SETTINGS:
        raise ValueError(f"task: expected one of {', '.join(SETTINGS)}, got {task!r}.")
    setting = SETTINGS[task]
    units: list[Unit] = importlib.import_module(setting.module).units(setting)
    return units
