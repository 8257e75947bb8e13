"""States of the random generators as plain values."""

import random
from typing import Any

import numpy
import torch

__all__ = ["check_rng_state", "get_rng_state", "set_rng_state"]


def get_rng_state() -> dict[str, Any]:
    """The states of the global generators of torch (CPU and every CUDA device), NumPy and Python.

    >>> state = get_rng_state()
    >>> first = torch.rand(3)
    >>> set_rng_state(state)
    >>> torch.equal(torch.rand(3), first)
    True
    """
    legacy: Any = numpy.random.get_state(legacy=True)
    name, keys, position, has_gauss, gauss = legacy
    version, words, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(name), torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(gauss)],
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss_next],
    }


def check_rng_state(state: Any) -> None:
    """Raises where :func:`set_rng_state` would, or where it would leave half of the generators behind."""
    try:
        torch.Generator().set_state(state["torch"].cpu())
        numpy.random.RandomState().set_state(_for_numpy(state))
        random.Random().setstate(_for_python(state))
        cuda = [s.cpu() for s in state["cuda"]]
        sound = all(s.dtype == torch.uint8 for s in cuda)
    except Exception as error:
        raise ValueError(f"rng: expected states of random generators, got something else: {error}") from error
    if not sound:
        raise ValueError("rng: expected states of random generators, got something else for CUDA.")


def set_rng_state(state: dict[str, Any]) -> None:
    """Sets what :func:`get_rng_state` gave; CUDA's where there are as many devices as there were."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
    numpy.random.set_state(_for_numpy(state))
    random.setstate(_for_python(state))


def _for_numpy(state: Any) -> Any:
    name, keys, position, has_gauss, gauss = state["numpy"]
    return name, keys.cpu().numpy().astype("uint32"), position, has_gauss, gauss


def _for_python(state: Any) -> Any:
    version, words, gauss_next = state["python"]
    return version, tuple(words.tolist()), gauss_next
