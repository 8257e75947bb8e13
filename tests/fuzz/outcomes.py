"""What a fuzzed call may do: answer, or raise an error that helps; and the odd values that it is called with."""

import linecache
import math
import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import torch
from hypothesis import HealthCheck
from hypothesis import strategies as st
from torch import Tensor

import pyro_vsd

PACKAGE = str(Path(pyro_vsd.__file__).parent)

# Errors of others that help as much as ours, and why.
ALLOWED = [
    # an argument of the wrong Python type: Python and torch name the type
    (TypeError, "", "."),
    # torch's check of a distribution's arg_constraints, which we declare: it names the argument and the constraint
    (ValueError, "torch/distributions/distribution.py", "Expected parameter .* to satisfy the constraint"),
    (ValueError, "torch/distributions/distribution.py", "Expected value argument .* to be within the support"),
    # Pyro's check of plates, which names the site and the shapes: where max_plate_nesting was given too small
    (ValueError, "pyro/util.py", "at site .*(invalid log_prob shape|plate stack overflow)"),
    # Pyro's check of a hand-written model, which names the site, the plate and the sizes
    (ValueError, "pyro/poutine/broadcast_messenger.py", "Shape mismatch inside plate"),
    # a convolution of the user's own on an image smaller than its kernel: torch names both sizes
    (RuntimeError, "pyro_vsd/distributions", "Kernel size can't be greater than actual input"),
    (RuntimeError, "torch/nn", "Kernel size can't be greater than actual input"),
]

RAISED = object()


def examples(number: int) -> Any:
    """Settings for a test of so many examples, times ``FUZZ_FACTOR`` for a longer run by hand."""
    factor = int(os.environ.get("FUZZ_FACTOR", "1"))
    # Building a network takes longer than hypothesis expects of an example; it is no sign of anything.
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return hypothesis.settings(max_examples=number * factor, suppress_health_check=checks)


def answer(call: Callable[[], Any]) -> Any:
    """What the call returns, or ``RAISED`` where it raised an error that helps. Any other error fails the test."""
    try:
        return call()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        line = linecache.getline(last.filename, last.lineno or 0).strip()
        ours = last.filename.startswith(PACKAGE) and isinstance(error, (ValueError, TypeError, Warning))
        # an error that Python raises in a line of ours is not one that we wrote: only a TypeError is allowed there
        if ours and line.startswith(("raise ", "warnings.warn(")) and str(error):
            return RAISED
        for kind, place, pattern in ALLOWED:
            if isinstance(error, kind) and place in last.filename and re.search(pattern, str(error), re.DOTALL):
                return RAISED
        place = f"{last.filename}:{last.lineno}: {line}"
        raise AssertionError(f"not an error that helps: {error!r}, raised by {place}") from error


def finite(value: Any) -> bool:
    return bool(torch.isfinite(torch.as_tensor(value)).all())


# What a user may pass by mistake where a number, a word or a tensor is wanted. No large numbers: a machine that has no
# memory left is a different matter. No functions: one of the user's own may raise what it likes.
JUNK: list[Any] = [
    None, True, False, 0, 1, 2, -1, 0.0, 0.3, 1.0, 2.5, -0.3, 1e-30, 1e30, math.nan, math.inf, -math.inf, "a", "free",
    np.float64(0.5), np.int64(2), torch.tensor(0.7), torch.tensor(2),
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
    """Mostly a sound tensor of this shape; now and then a different shape, dtype or value, or no tensor at all."""
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
        dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]
        value = value.to(draw(st.sampled_from(dtypes)))
    elif odd == 3:
        value = value * draw(st.sampled_from([0.0, -1.0, 1e-12, 1e12, math.nan, math.inf]))
    elif odd == 4 and value.numel():
        value.view(-1)[0] = draw(st.sampled_from([0.0, -1.0, math.nan, math.inf]))
    elif odd == 5:
        value = value.expand(2, *value.shape)
    elif odd == 6 and value.dim() > 1:
        value = value.mT.contiguous().mT  # a different memory layout, the same numbers
    return value


def sizes(low: int = 1, high: int = 4) -> st.SearchStrategy[int]:
    return st.integers(low, high)
