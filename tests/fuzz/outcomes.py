"""What a fuzzed call may do: answer, or refuse with an error of ours; and the odd values it is called with."""

import linecache
import math
import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy
import torch
from hypothesis import HealthCheck
from hypothesis import strategies as st
from torch import Tensor

import pyro_vsd

PACKAGE = str(Path(pyro_vsd.__file__).parent)

# Errors of others that stand for ours, and why.
ALLOWED = [
    # torch's check of a distribution's arg_constraints, which we declare: it names the argument and the constraint
    (ValueError, "torch/distributions/distribution.py", "Expected parameter .* to satisfy the constraint"),
    (ValueError, "torch/distributions/distribution.py", "Expected value argument .* to be within the support"),
    # Pyro's check of plates, which names the site and the shapes: where max_plate_nesting was given too small
    (ValueError, "pyro/util.py", "at site .*(invalid log_prob shape|plate stack overflow)"),
    # Pyro's check of a hand-written model, which names the site, the plate and the sizes
    (ValueError, "pyro/poutine/broadcast_messenger.py", "Shape mismatch inside plate"),
    # a layer of the user's own met no tensor, or too many inputs: models pass inputs on, whatever they are
    (TypeError, "torch/nn/modules", "must be Tensor, not|invalid combination of arguments|positional arguments? but"),
    # a convolution of the user's own on an image smaller than its kernel: torch names both sizes
    (RuntimeError, "pyro_vsd/distributions/lazy_operations.py", "Kernel size can't be greater than actual input"),
]

REFUSED = object()


def examples(number: int) -> Any:
    """Settings for a test of so many examples, times ``FUZZ_FACTOR`` for a longer run by hand."""
    factor = int(os.environ.get("FUZZ_FACTOR", "1"))
    # Building a network takes longer than hypothesis expects of an example; it is no sign of anything.
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return hypothesis.settings(max_examples=number * factor, suppress_health_check=checks)


def answer(call: Callable[[], Any]) -> Any:
    """What the call returns, or ``REFUSED`` where it raised an error of ours. Anything else fails the test."""
    try:
        return call()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        line = linecache.getline(last.filename, last.lineno or 0).strip()
        ours = last.filename.startswith(PACKAGE) and isinstance(error, (ValueError, TypeError, Warning))
        # an error that Python raises in a line of ours is not one that we wrote
        if ours and line.startswith(("raise ", "warnings.warn(")) and str(error):
            return REFUSED
        for kind, place, pattern in ALLOWED:
            if isinstance(error, kind) and place in last.filename and re.search(pattern, str(error), re.DOTALL):
                return REFUSED
        place = f"{last.filename}:{last.lineno}: {line}"
        raise AssertionError(f"not an error of ours: {error!r}, raised by {place}") from error


def finite(value: Any) -> bool:
    return bool(torch.isfinite(torch.as_tensor(value)).all())


# What a user may pass by mistake where a number or a word is wanted. Nothing asks for much memory: a machine that has
# none left is another matter. No functions: one of the user's own may raise what it likes.
JUNK: list[Any] = [
    None, True, False, 0, 1, 2, 3, -1, -3, 0.0, 0.3, 1.0, 2.5, -0.3, 1e-30, 1e30, math.nan, math.inf, -math.inf, 1j, "",
    "a", "free", [], [1, 2], (2,), (2, 3), {}, {"a": 1}, b"x", range(3), numpy.float64(0.5), numpy.int64(2),
    numpy.ones(2), torch.tensor(0.7), torch.tensor([0.5, 2.0]), torch.tensor(2), object(),
]  # fmt: skip


def junk() -> st.SearchStrategy[Any]:
    return st.sampled_from(JUNK)


@st.composite
def mostly(draw: Any, *good: Any) -> Any:
    """Mostly one of the good values or strategies, now and then junk."""
    if draw(st.integers(0, 9)) == 0:
        return draw(junk())
    choice = draw(st.sampled_from(good))
    return draw(choice) if isinstance(choice, st.SearchStrategy) else choice


@st.composite
def tensors(draw: Any, shape: Any, positive: bool = False) -> Any:
    """Mostly a sound tensor of this shape; now and then another shape, dtype or value, or no tensor at all."""
    odd = draw(st.integers(0, 11))
    if odd == 0:
        return draw(junk())
    if odd == 1:
        shape = draw(st.lists(st.integers(0, 3), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 3)))
    value: Tensor = torch.randn(tuple(shape), generator=generator)
    if positive:
        value = value.exp()
    if odd == 2:
        dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex128]
        value = value.to(draw(st.sampled_from(dtypes)))
    elif odd == 3:
        value = value * draw(st.sampled_from([0.0, -1.0, 1e-12, 1e12, math.nan, math.inf]))
    elif odd == 4 and value.numel():
        value.view(-1)[0] = draw(st.sampled_from([0.0, -1.0, math.nan, math.inf]))
    elif odd == 5:
        value = value.expand(2, *value.shape)
    elif odd == 6 and value.dim() > 1:
        value = value.mT.contiguous().mT  # another memory layout, the same numbers
    return value


def sizes(low: int = 1, high: int = 4) -> st.SearchStrategy[int]:
    return st.integers(low, high)
