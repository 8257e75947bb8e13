"""What is run: a unit is a task, a variant of a method and a seed. Settings make units, task modules run them.

A task module offers ``units(setting) -> list[Unit]`` and ``run(unit, data, work, **how) -> dict``; the dict is what
the store keeps.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Setting", "Unit", "Variant"]


@dataclass(frozen=True)
class Variant:
    """A method with its options.

    :param method: a name of ``pyro_vsd.baselines.METHODS``.
    :param options: of the method, as JSON holds them.
    :param label: in tables.
    :param paper: the row of the paper's tables it stands beside, if any.
    :param lr: learning rate; the task's by default.
    :param rates: those of a guide's parameters that have their own, by role: ``{"log_alpha": 1e-2}``.
    :param schedule: ``"cosine"`` to zero, ``"swag"`` (constant, then falling to a fifth from half to two thirds of the
        training, then constant), ``"steps"`` (times 0.3 after every tenth of the training: the paper's, over its 100
        epochs), or ``"constant"``.
    :param optimizer: ``"own"``, the method's, or ``"sgd"`` with momentum 0.9 on the loss per row.
    :param epochs: of training; the task's by default.
    :param tuned: what the search of this variant chooses, ``{name: (scale, low, high)}`` with the scale ``"log"`` or
        ``"linear"``; ``lr`` is the learning rate, other names are options. ``tune`` has to be run before.
    :param seeds: the task's by default.
    """

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    paper: str | None = None
    lr: float | None = None
    schedule: str = "cosine"
    optimizer: str = "own"
    epochs: int | None = None
    tuned: dict[str, tuple[str, float, float]] = field(default_factory=dict)
    seeds: tuple[int, ...] | None = None
    rates: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """A data set, a network, how it is trained, and the variants to compare.

    :param data: a loader of ``pyro_vsd.datasets``; ``ood`` names those of out-of-distribution inputs.
    :param network: a name of ``pyro_vsd.nn``.
    :param num_validation: rows split off the training set.
    :param augment: random crops of padded images, with ``flip`` mirrored ones too.
    :param tuned_as: the task whose searches are used; its own by default.
    """

    task: str
    data: str
    network: str
    network_options: dict[str, Any]
    variants: dict[str, Variant]
    ood: tuple[str, ...] = ()
    flatten: bool = False
    num_validation: int = 0
    epochs: int = 15
    batch_size: int = 100
    lr: float = 1e-3
    num_samples: int = 50
    augment: bool = False
    flip: bool = False
    normalize: bool = False
    channels_last: bool = False
    tuned_as: str | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    module: str = "benchmarks.paper.images"

    def common(self) -> dict[str, Any]:
        """What all variants share, for the record."""
        others = ("variants", "module", "seeds", "task", "tuned_as")
        return {key: value for key, value in asdict(self).items() if key not in others}


@dataclass(frozen=True)
class Unit:
    """One thing to run.

    :param setting: whatever the task module needs beside the three parts of the key.
    """

    task: str
    variant: str
    seed: int
    module: str
    setting: Any = None

    @property
    def name(self) -> str:
        return f"{self.task}/{self.variant}-seed{self.seed}"
