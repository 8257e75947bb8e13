"""A training step as one compiled program: ``vsd.compile_step``."""

import inspect
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import pyro
import torch
from pyro.poutine.runtime import am_i_wrapped
from torch import Tensor, nn, optim
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_vsd._utils import Watch, capturing, check_choice
from pyro_vsd.infer import VSD_ELBO

__all__ = [
    "CompiledLoss",
    "CompiledStep",
    "Program",
    "close",
    "compile_step",
    "first_line",
    "replay",
    "stepper",
    "steps_not_counted",
]

# Each new shape or mode costs a compilation: after this many, further ones run eagerly.
_MOST = 4
# Calls of a new program that are compared with the eager loss.
_COMPARED = 2
# Largest difference from the eager loss and its gradients, by the norm. Captured operators are the eager ones; a branch
# or a hook that was not captured differs by far more. Compiled ones round differently, which switches single ReLUs: in
# ResNet-18 gradients differ by almost 0.01.
_CAPTURED = {torch.float64: 1e-9, torch.float32: 1e-4}
_COMPILED = {torch.float64: 1e-6, torch.float32: 5e-2}
# A gradient that is zero but for rounding (a bias before batch normalisation) is compared with the largest of all.
_SMALL = 1e-3
# A compilation is expected to take so many seconds, and to save this share of a step of captured operators.
_COMPILATION, _SAVED = 20.0, 0.15
# Capturing takes less than a second and saves two milliseconds of an eager step: it pays from so many steps of a run
# on, and for one of several sizes of batches from this share of them.
_CAPTURE_STEPS, _OF_ONE_SIZE = 500, 0.4
# Evaluations behind a time, after those in which TorchScript optimises.
_TIMED, _WARM = 5, 2
_TOO_FEW = "too few steps are to come for a compilation to pay"
_MODES = ("compile", "capture")


def compile_step(loss: nn.Module, optimizer: optim.Optimizer, *, mode: str = "compile") -> "CompiledStep":
    """Compiles a training step: loss, gradients and KL as one program, then the optimiser.

    The first call captures the loss and its gradients through Pyro and compiles them, which takes some twenty seconds
    (a few in later processes, from torch's cache). Later calls cost about as much as a step of the plain network. With
    equal random states the numbers are those of the eager step, to rounding. The first two calls are compared with the
    eager loss; where they differ, or nothing can be captured, the step runs eagerly, with one warning.

    With ``mode="capture"`` the captured operators run one after the other, without Pyro and autograd. This takes less
    than a second to prepare, needs no C++ compiler and gives the eager numbers, but for the last bit of some operators;
    a small network's step takes about a third of the eager one's time.

    The weight of the KL, the data, parameters, buffers and learning rates may change from step to step. A new shape,
    dtype or mode, and a changed module, is compiled anew, at most four times. Python's own values are constants: those
    of globals and what the network computes from them. Distributions do not validate their values, once captured.

    :param loss: the module form of the objective, ``vsd.VSD_ELBO()(model, guide)``.
    :param optimizer: a torch optimiser of its parameters. A fused one is the fastest.
    :param mode: ``"compile"`` or ``"capture"``.
    :returns: a function ``step(*batch)`` that makes one update and returns the loss, a detached tensor. ``step.reason``
        says why the last step was not what ``mode`` asks for; it is ``None`` where it was.

    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=100)
    >>> loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model))
    >>> step = vsd.compile_step(loss, torch.optim.Adam(loss.parameters(), lr=1e-3, fused=True), mode="capture")
    >>> losses = [step(torch.randn(10, 4), torch.arange(10) % 3) for _ in range(5)]
    >>> step.reason  # None: nothing stood in the way
    """
    if not isinstance(loss, nn.Module) or not hasattr(loss, "elbo"):
        raise TypeError(f"loss must be a module vsd.VSD_ELBO()(model, guide), not a {type(loss).__name__}.")
    if not isinstance(optimizer, optim.Optimizer):
        raise TypeError(
            f"optimizer must be one of torch.optim, not a {type(optimizer).__name__}: "
            "torch.optim.Adam(loss.parameters())."
        )
    check_choice("mode", mode, _MODES)
    return CompiledStep(CompiledLoss(loss, mode=mode), optimizer)


class CompiledStep:
    """A compiled training step; see :func:`compile_step`."""

    def __init__(self, loss: "CompiledLoss", optimizer: optim.Optimizer):
        self.loss, self.optimizer = loss, optimizer
        self._take = stepper(optimizer)

    @property
    def reason(self) -> str | None:
        """Why the last step was not compiled (or captured, where that was asked for), or ``None``."""
        return self.loss.reason

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        elbo, values = self.loss.elbo, []

        def closure() -> Any:
            for group in self.optimizer.param_groups:  # zero_grad takes 20 µs
                for parameter in group["params"]:
                    parameter.grad = None
            values.append(self.loss.backward(args, kwargs))
            if values[-1].device.type == "cpu" and hasattr(elbo, "check_finite"):
                elbo.check_finite()  # before the parameters are touched
            return values[-1]

        with steps_not_counted(elbo):
            self._take(closure)
        if isinstance(elbo, VSD_ELBO):
            elbo.step += 1
        return values[0]


def stepper(optimizer: optim.Optimizer) -> Callable[[Callable[[], Any]], Any]:
    """What makes a step, given a function that computes the gradients. Optimisers that evaluate it themselves (LBFGS)
    get it; for the others it is called before, so that hooks on their steps find the gradients."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        return optimizer.step

    def step(closure: Callable[[], Any]) -> None:
        closure()
        optimizer.step()

    return step


@contextmanager
def steps_not_counted(elbo: Any) -> Iterator[None]:
    """Evaluations inside do not advance a KL schedule: whoever steps the optimiser counts."""
    if not isinstance(elbo, VSD_ELBO):
        yield
        return
    before, elbo.auto_step = elbo.auto_step, False
    try:
        yield
    finally:
        elbo.auto_step = before


class CompiledLoss:
    """A loss and its gradients as compiled programs, one for each shape and mode of the batches.

    :param loss: the module form of an ELBO.
    :param steps: how many batches of so many rows, or of any size (``None``), are to come. Where it is given, only what
        pays is compiled; with fewer steps the captured operators are run as they are, without Pyro, which gives the
        eager numbers bit for bit.
    :param mode: where ``steps`` is not given: ``"compile"`` or ``"capture"``.
    :ivar reason: why the last call was not compiled, or ``None``.
    :ivar choices: what is done with batches of so many rows: ``"compiled"``, ``"captured"`` or ``"eager"``.
    :ivar announce: gets a line of text before each compilation; by default it goes to a terminal's standard error.
    """

    def __init__(self, loss: nn.Module, steps: Callable[[int | None], int] | None = None, mode: str = "compile"):
        self.loss: Any = loss
        self.elbo: Any = loss.elbo
        self.steps, self.mode = steps, mode
        self.reason: str | None = None
        self.choices: dict[int, str] = {}
        self.announce = _to_terminal
        self._programs: dict[Any, Program] = {}
        self._captures = 0
        self._refused: dict[Any, str] = {}

    def backward(self, args: tuple[Any, ...], kwargs: dict[str, Any], share: float = 1.0) -> Tensor:
        """The loss of a batch, detached; ``share`` times its gradients are added to those of the parameters."""
        if am_i_wrapped():
            self.reason = "a handler of Pyro is active"
            return self.eager(args, kwargs, share)
        key, tensors = self._key(args, kwargs)
        program = self._programs.get(key)
        if program is not None and not program.fits():
            del self._programs[key]
            program = None
        if program is None or program.compared < _COMPARED:
            return self._carefully(key, program, args, kwargs, tensors, share)
        self.reason = program.reason
        try:
            return program.backward(tensors, self._weight(), share)
        except Exception as error:  # labels out of range, for instance
            loss = self.eager(args, kwargs, share)  # raises in the model's own words
            del self._programs[key]
            self._refuse(key, first_line(error))
            return loss

    def differentiable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The loss of a batch as a tensor. Its gradients are computed along with it; its backward pass hands them out,
        so that whoever calls it may scale, accumulate and clip as usual."""
        key, tensors = self._key(args, kwargs)
        reason = self._refused.get(key)
        if reason is None and key not in self._programs:
            reason = self._why_not(key, args, kwargs, tensors)
        if reason is not None:
            self.reason = reason
            eager: Tensor = self.loss(*args, **kwargs)
            return eager
        parameters = [p for p in self.loss.parameters() if p.requires_grad]
        before = [p.grad for p in parameters]
        try:
            for p in parameters:
                p.grad = None
            value = self.backward(args, kwargs)
            found = [(p, p.grad) for p in parameters if p.grad is not None]
        finally:
            for p, gradient in zip(parameters, before, strict=True):
                p.grad = gradient
        result: Tensor = _Known.apply(value, [gradient for _, gradient in found], *(p for p, _ in found))
        return result

    def eager(self, args: tuple[Any, ...], kwargs: dict[str, Any], share: float = 1.0) -> Tensor:
        """The same without a program."""
        loss: Tensor = self.loss(*args, **kwargs)
        (loss if share == 1.0 else loss * share).backward()
        return loss.detach()

    def _weight(self) -> float:
        return self.elbo.current_weight() if isinstance(self.elbo, VSD_ELBO) else 1.0

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Tensor]]:
        if not kwargs and all(type(a) is Tensor for a in args):
            tensors: list[Any] = list(args)
            rest: Any = None
        else:
            leaves, spec = tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            rest = (spec, tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves))
        shapes: tuple[Any, ...] = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)
        if len(set(map(id, tensors))) < len(tensors):  # one tensor for two arguments is one input of the program
            shapes += tuple(map([id(t) for t in tensors].index, map(id, tensors)))
        device = tensors[0].device.type if tensors else "cpu"
        return (shapes, torch.is_autocast_enabled(device), torch.get_default_dtype(), _Unhashable.wrap(rest)), tensors

    def _carefully(
        self, key: Any, program: "Program | None", args: Any, kwargs: Any, tensors: list[Tensor], share: float
    ) -> Tensor:
        """A call of a program that is new, or that is to be made."""
        reason = self._refused.get(key)
        if reason is None and program is None:
            reason = self._why_not(key, args, kwargs, tensors)
        if reason is not None:
            self.reason = reason
            return self.eager(args, kwargs, share)
        parameters = [p for p in self.loss.parameters() if p.requires_grad]
        fitting = [other for other in self._programs.values() if other.fits()]
        before = _State(self.loss, parameters)
        watch = Watch(*_written_by_users(self.loss))
        loss = self.eager(args, kwargs)
        if not watch.fits():
            self._programs.pop(key, None)
            self._refuse(key, "the network changes its own attributes when it is called")
            after = _State(self.loss, parameters)
            after.gradients_times(share, before.gradients)
            return loss
        expected = _State(self.loss, parameters, loss, _pieces(self.elbo))
        before.put_back()
        try:
            if program is None:
                self._captures += 1
                program = self._program(args, kwargs, tensors)
                before.put_back()
            for call, tolerance in program.checks():
                found_loss = program.backward(tensors, self._weight(), 1.0, call)
                found = _State(self.loss, parameters, found_loss, _pieces(self.elbo))
                reason = reason or found.differs_from(expected, tolerance)
                if call is not program.call:
                    before.put_back()
        except Exception as error:  # whatever the model, the tracer or the compiler raises
            reason = first_line(error)
        if reason is None:
            assert program is not None
            program.compared += 1
            self._programs[key] = program
            self.reason = program.reason
            if self.steps is not None and program.compared == 1:
                self._race(key, program, args, kwargs, tensors)
        else:
            self._programs.pop(key, None)
            self._refuse(key, reason)
            found, found_loss = expected, loss
            _put_pieces(self.elbo, expected.pieces)
            found.put_back()
        for other in [*fitting, *([program] if reason is None and program is not None else [])]:
            other.refresh()  # the evaluations here have moved counters of the model's own
        found.gradients_times(share, before.gradients)
        return found_loss

    def _why_not(self, key: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> str | None:
        """Why batches of a new kind are not compiled."""
        if getattr(self.loss.guide, "needs_setup", False):  # which is no part of a program
            self.loss.guide.setup(*args, **kwargs)
        if self.steps is not None:
            rows = _rows(tensors)
            if rows not in self.choices and min(self.steps(None), self.steps(rows) / _OF_ONE_SIZE) <= _CAPTURE_STEPS:
                self.choices[rows] = "eager"
            if self.choices.get(rows) == "eager":
                self._refused[key] = _TOO_FEW
                return _TOO_FEW
        if key[1]:
            return self._refuse(key, "autocast is on, and its casts cannot be captured")
        if any(hasattr(p, "full_tensor") for p in self.loss.parameters()):
            return self._refuse(key, "its parameters are sharded, and gathering them cannot be captured")
        if getattr(self.elbo, "vectorize_particles", False) and self.elbo.num_particles > 1:
            return self._refuse(key, "vectorize_particles=True cannot be captured; a loop over particles can")
        if self._captures >= _MOST:
            return self._refuse(key, f"{_MOST} shapes or modes of batches have been compiled, and this is one more")
        return None

    def _refuse(self, key: Any, reason: str) -> str:
        self._refused[key] = self.reason = reason
        warnings.warn(f"the training step runs eagerly: {reason}.", stacklevel=6)
        return reason

    def _time(self, args: Any, kwargs: Any, program: "Program | None" = None, tensors: Any = None) -> float:
        """Seconds of an evaluation, which leaves nothing behind."""
        parameters = [p for p in self.loss.parameters() if p.requires_grad]
        state, seconds = _State(self.loss, parameters), []
        for _ in range(_WARM + _TIMED):
            start = time.perf_counter()
            self.eager(args, kwargs) if program is None else program.backward(tensors, self._weight(), 1.0)
            seconds.append(time.perf_counter() - start)
            state.put_back()
        for p, gradient in zip(parameters, state.gradients, strict=True):
            p.grad = gradient
        return statistics.median(seconds[_WARM:])

    def _race(self, key: Any, program: "Program", args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        """Leaves a program that is no faster than the eager loss."""
        pieces = _pieces(self.elbo)
        eager, compiled = self._time(args, kwargs), self._time(args, kwargs, program, tensors)
        _put_pieces(self.elbo, pieces)
        if compiled >= eager:
            self._programs.pop(key)
            self.choices[_rows(tensors)] = "eager"
            self._refused[key] = "the eager step is as fast"

    def _program(self, args: Any, kwargs: Any, tensors: list[Tensor]) -> "Program":
        """A new program, compiled if that is asked for or pays."""
        program = Program(self.loss, args, kwargs, tensors)
        if self.steps is None:
            if self.mode == "compile":
                self._compile(program, tensors)
            return program
        rows = _rows(tensors)
        if rows not in self.choices:
            self.choices[rows] = "captured"
            seconds = self._time(args, kwargs, program, tensors)
            if self.steps(rows) * _SAVED * seconds > _COMPILATION:
                self._compile(program, tensors)
                if program.compiled and self._time(args, kwargs, program, tensors) < seconds:
                    self.choices[rows] = "compiled"
                else:
                    program.call = program.captured
        elif self.choices[rows] == "compiled":
            self._compile(program, tensors)
        if self.choices[rows] == "captured":
            program.reason = program.reason or _TOO_FEW
        return program

    def _compile(self, program: "Program", tensors: list[Tensor]) -> None:
        self.announce(f"compiling the training step: about {_COMPILATION:.0f} s, once")
        try:
            program.compile(tensors)
        except Exception as error:  # no C++ compiler, for instance
            program.reason = first_line(error)
            warnings.warn(
                f"the training step is not compiled: {program.reason}. Its captured operators run one by one.",
                stacklevel=6,
            )


def _written_by_users(loss: nn.Module) -> list[nn.Module]:
    own = ("pyro_vsd", "pyro", "torch")
    held = [vars(module).get("network", module) for module in loss.modules()]
    return [module for module in held if type(module).__module__.partition(".")[0] not in own]


def _rows(tensors: list[Tensor]) -> int:
    return len(tensors[0]) if tensors and tensors[0].dim() else 0


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _to_terminal(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"{text}\n")


class _Unhashable:
    """Compares by identity what cannot be hashed."""

    @staticmethod
    def wrap(value: Any) -> Any:
        try:
            hash(value)
        except TypeError:
            return object()  # never found again: such batches are compiled anew, then run eagerly
        return value


class _State:
    """What a call of the loss leaves behind: gradients, buffers, generators."""

    def __init__(self, loss: nn.Module, parameters: list[Any], value: Any = None, pieces: Any = None):
        self.parameters, self.value, self.pieces = parameters, value, pieces
        self.gradients = [p.grad for p in parameters]
        self.buffers = [(b, b.clone()) for b in loss.buffers()]
        self.rng = torch.get_rng_state()
        for p in parameters:
            p.grad = None

    def put_back(self) -> None:
        """Buffers and generators as they were, no gradients."""
        torch.set_rng_state(self.rng)
        with torch.no_grad():
            for buffer, value in self.buffers:
                buffer.copy_(value)
        for p in self.parameters:
            p.grad = None

    def gradients_times(self, share: float, earlier: list[Any]) -> None:
        for p, gradient, old in zip(self.parameters, self.gradients, earlier, strict=True):
            if gradient is not None and share != 1.0:
                gradient = gradient * share
            p.grad = gradient if old is None else old if gradient is None else old + gradient

    def differs_from(self, other: "_State", tolerance: dict[torch.dtype, float]) -> str | None:
        if not torch.equal(self.rng, other.rng):
            return "the captured step draws a different number of random numbers"
        if [g is None for g in self.gradients] != [g is None for g in other.gradients]:
            return "the captured step has gradients for different parameters"
        pairs = {
            "loss": [(self.value, other.value)],
            "gradients": [(a, b) for a, b in zip(self.gradients, other.gradients, strict=True) if b is not None],
            "buffers": [(a[1], b[1]) for a, b in zip(self.buffers, other.buffers, strict=True)],
        }
        for name, values in pairs.items():
            if values and not close(values, tolerance):
                return f"the {name} of the captured step and of the eager one differ (a branch on data, or a hook?)"
        return None


def close(pairs: list[tuple[Tensor, Tensor]], tolerance: dict[torch.dtype, float] = _COMPILED) -> bool:
    norms = [float(b.nan_to_num(0.0, 0.0, 0.0).double().norm()) for _, b in pairs]
    for (a, b), norm in zip(pairs, norms, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.isfinite(), b.isfinite()):
            return False
        bound = tolerance.get(b.dtype, 5e-2) * max(norm, _SMALL * max(norms))
        if float((a - b).nan_to_num(0.0, 0.0, 0.0).double().norm()) > bound:
            return False
    return True


class _Known(torch.autograd.Function):
    """A number whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(gradient * g for gradient in ctx.gradients)


# ---- what an ELBO remembers of an evaluation


def _pieces(elbo: Any) -> dict[str, Any]:
    return elbo.remembered() if isinstance(elbo, VSD_ELBO) else {}


def _put_pieces(elbo: Any, pieces: dict[str, Any]) -> None:
    if isinstance(elbo, VSD_ELBO):
        elbo.remember(pieces)


# ---- the program


class Program:
    """The loss, its gradients and terms as one graph of torch's operators.

    Every tensor from outside (parameters, buffers, constants of the model) is an input, so that only plain Python
    values are constants; :meth:`fits` says whether those are still what they were.

    :ivar reason: why it is not compiled.
    """

    def __init__(self, loss: Any, args: Any, kwargs: Any, tensors: list[Tensor]):
        from torch._dispatch.python import enable_python_dispatcher
        from torch.fx.experimental.proxy_tensor import make_fx

        self.loss, self.elbo = loss, loss.elbo
        self.reason: str | None = None
        self.compiled, self.compared = False, 0
        leaves, spec = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        trained = [p for p in loss.parameters() if p.requires_grad]

        def objective(weight: Tensor, *tensors: Tensor) -> list[Tensor]:
            values = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                values[place] = tensor
            args, kwargs = tree_unflatten(values, spec)
            with _weight_given(self.elbo, weight):
                total = loss(*args, **kwargs)
            gradients = torch.autograd.grad(total, trained, allow_unused=True)
            self.parameters = [p for p, g in zip(trained, gradients, strict=True) if g is not None]
            found = [_laid_out(g, p) for p, g in zip(trained, gradients, strict=True) if g is not None]
            self.layout: Any = _pieces(self.elbo)
            return [total.detach(), *found, *(value for part in self.layout.values() for value in part.values())]

        like = next((p for p in trained), tensors[0])
        self._weight_tensor = torch.ones((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        quiet = pyro.validation_enabled(False), steps_not_counted(self.elbo), capturing()
        with quiet[0], quiet[1], quiet[2], enable_python_dispatcher(), _NoReading():
            graph = make_fx(objective)(self._weight_tensor, *tensors)
        for node in graph.graph.nodes:
            if _depends_on_data(node):
                raise ValueError(f"the shape of the result of {node.target} depends on the data")
        self.graph, self.constants = _lift(graph)
        self._trained = list(loss.parameters())
        self._modules = Watch(loss)
        self.refresh()
        self.call = self.captured = replay(self.graph, [self._weight_tensor, *tensors, *self.constants])

    def compile(self, tensors: list[Tensor]) -> None:
        self.call = _compile(self.graph, [self._weight_tensor, *tensors, *self.constants])
        self.compiled = True

    def checks(self) -> list[tuple[Callable[..., Any], dict[torch.dtype, float]]]:
        """What is compared with the eager loss, and how closely; :attr:`call` comes last."""
        captured = (self.captured, _CAPTURED)
        return [captured] if self.call is self.captured else [captured, (self.call, _COMPILED)]

    def backward(
        self, tensors: list[Tensor], weight: float, share: float, call: Callable[..., Any] | None = None
    ) -> Tensor:
        self._weight_tensor.fill_(weight)
        with torch.no_grad():
            loss, *rest = (call or self.call)(self._weight_tensor, *tensors, *self.constants)
        for p, gradient in zip(self.parameters, rest, strict=False):
            if share != 1.0:
                gradient.mul_(share)
            p.grad = gradient if p.grad is None else p.grad + gradient
        values = iter(rest[len(self.parameters) :])
        _put_pieces(self.elbo, {part: dict(zip(names, values)) for part, names in self.layout.items()})  # noqa: B905
        result: Tensor = loss
        return result

    def fits(self) -> bool:
        """Whether modules, their attributes and hooks are those of the capture."""
        return self._modules.fits() and all(map(is_, self._settings(), self._known))

    def refresh(self) -> None:
        """Takes the present structure for that of the capture: what the loss itself writes does not count."""
        self._modules.refresh()
        self._known = list(self._settings())

    def _settings(self) -> Iterator[Any]:
        return chain(
            map(attrgetter("requires_grad"), self._trained),
            map(attrgetter("_backward_hooks"), self._trained),
            _settings(self.elbo),
        )


def _depends_on_data(node: Any) -> bool:
    """Whether the shape of an operator's result does."""
    if node.target is torch.ops.aten.index.Tensor:
        return any(i is not None and i.meta["tensor_meta"].dtype == torch.bool for i in node.args[1])
    return torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())


class _NoReading(TorchFunctionMode):
    """Raises where values of tensors become Python's, out of the capture's sight."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.numpy, Tensor.tolist, Tensor.__array__):
            raise ValueError(f"the network reads values of its tensors ({func.__name__})")
        return func(*args, **(kwargs or {}))


def _compile(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Torch's own random numbers: those that the compiler generates are several times slower on a CPU.
        compiled: Any = compile_fx(graph, inputs, config_patches={"fallback_random": True})
    return compiled


def replay(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
    """The captured operators, one after the other: by TorchScript's interpreter, which calls them twice as fast as
    Python does, where its tracer knows them all (not the gradient of a convolution)."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, without anything in its place
        run: Callable[..., Any]
        try:
            # What ``torch.jit.trace`` does, but for its registry, which would keep every function for good.
            traced, _ = torch._C._create_graph_by_tracing(
                lambda *given: tuple(graph(*given)), tuple(inputs), lambda tensor: "", False, False, None, []
            )
            run = torch._C._create_function_from_graph("replay", traced)
        except (AttributeError, RuntimeError):
            run = graph.forward
    return run


def _lift(graph: Any) -> tuple[Any, list[Tensor]]:
    """The graph with inputs in place of the tensors that it holds, and these tensors."""
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    inputs: dict[int, Any] = {}
    tensors: list[Tensor] = []
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        tensor = getattr(graph, node.target)
        if id(tensor) not in inputs:
            with graph.graph.inserting_after(last):
                last = inputs[id(tensor)] = graph.graph.placeholder(f"held_{len(tensors)}")
            tensors.append(tensor)
        node.replace_all_uses_with(inputs[id(tensor)])
        graph.graph.erase_node(node)
    return torch.fx.GraphModule(nn.Module(), graph.graph), tensors


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient in the parameter's memory layout, which fused optimisers rely on."""
    if gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype:
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _settings(elbo: Any) -> tuple[Any, ...]:
    names = ("num_particles", "vectorize_particles", "kl_scale", "prior", "unit_kl")
    return tuple(getattr(elbo, name, None) for name in names)


@contextmanager
def _weight_given(elbo: Any, weight: Tensor) -> Iterator[None]:
    if not isinstance(elbo, VSD_ELBO):
        yield
        return
    elbo.given_weight = weight
    try:
        yield
    finally:
        elbo.given_weight = None
