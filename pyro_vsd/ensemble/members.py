"""Making an ensemble's members: models from a factory or as copies, each with a guide."""

import copy
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn

from pyro_vsd._utils import check_choice, check_integer, mix_seed, reset_parameters_
from pyro_vsd.infer import VSD_ELBO, VSDGuide

__all__ = ["SPREAD", "Member", "kl_weights", "make_members", "silence"]

# λ of a member: a number, a schedule, or None for a plain one.
KLWeight = float | Callable[[int], float] | None
Member = tuple[Any, VSDGuide]

#: λ of the members by default: an ensemble of M has the first M, and more begin again. What is best differs by two
#: decades between data sets, and noise does not help everywhere. See docs/ensembles_evidence.md.
SPREAD = (1.0, None, 0.1, 3.0, 0.01, 0.3, None, 0.03)
# The logs of a plain member's noise variances, and of the standard deviations of its other sites. 1 + sqrt(α) ε is 1 in
# double precision, and the KL still finite. Densities of other sites must be finite, too.
_NONE = {"log_alpha": -80.0, "vectors": None, "log_scale": -20.0, "z_log_scale": -20.0}


def kl_weights(members: int, kl_weight: Any) -> list[KLWeight]:
    """λ of each member."""
    check_integer("members", members, 1)
    if isinstance(kl_weight, str):
        check_choice("kl_weight", kl_weight, ("spread",))
        return list(islice(cycle(SPREAD), members))
    if hasattr(kl_weight, "tolist"):  # arrays and tensors
        kl_weight = kl_weight.tolist()
    if not isinstance(kl_weight, Sequence):
        return [kl_weight] * members
    if len(kl_weight) != members:
        raise ValueError(f"kl_weight must have one entry for each of members={members}, not {len(kl_weight)}.")
    return list(kl_weight)


def make_members(source: Any, weights: Sequence[KLWeight], seed: int, options: dict[str, Any]) -> list[Member]:
    """A model and its guide for each λ, each from a seed of its own; torch's generators are left as they were."""
    for weight in weights:
        VSD_ELBO(kl_weight=0.0 if weight is None else weight)  # which checks it
    members: list[Member] = []
    with torch.random.fork_rng(devices=[]):
        for m in range(len(weights)):
            torch.manual_seed(mix_seed(seed, m))
            model = reset_parameters_(copy.deepcopy(source)) if isinstance(source, nn.Module) else source()
            if not isinstance(model, nn.Module):
                raise TypeError(f"model_or_factory must return a model that is a module, not a {type(model).__name__}.")
            members.append((model, VSDGuide(model, **options)))
    seen: dict[int, int] = {}
    for m, (model, _) in enumerate(members):
        for tensor in (model, *model.parameters()):
            if seen.setdefault(id(tensor), m) != m:
                what = "the same model" if tensor is model else "models with the same parameters"
                raise ValueError(f"model_or_factory returns {what} twice. Make new ones in each call.")
    return members


def silence(guide: VSDGuide) -> None:
    """Takes the noise from a guide that is set up: a plain member. It stays without in training."""
    with torch.no_grad():
        for role, value in _NONE.items():
            module: Any = getattr(guide, role, None)
            for parameter in () if module is None else module.parameters():
                parameter.requires_grad_(False)
                if value is not None:
                    parameter.fill_(value)
