"""Several networks of one shape as one program: the losses and gradients of an ensemble's members in one call."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from pyro_vsd.training.compiling import Program, close, first_line, replay, steps_not_counted

__all__ = ["JointLoss", "NotJointError"]


class NotJointError(Exception):
    """Why the members cannot run as one program."""


class JointLoss:
    r"""The losses of M members and their gradients as one program, with the members in a dimension in front.

    The loss of one member is captured through Pyro as a graph of torch's operators (as for
    :func:`~pyro_vsd.training.compile_step`), made free of in-place operators, and mapped over parameters, buffers and λ
    by ``torch.vmap``. Each member draws its own noise; all see the same batch. A small network's step costs little more
    for five members than for one, since most of it is the fixed cost of calling its operators.

    The first batch of each shape is compared with every member's own loss and gradients, at equal noise.

    The parameters are stacked, one tensor for each name; those of the members become views of it until :meth:`part`.

    :param losses: the module forms of the members' ELBOs.
    :ivar parameters: the stacked parameters that are trained.
    :raises NotJointError: if the members differ in their parameters.
    """

    def __init__(self, losses: Sequence[nn.Module]):
        self.losses: list[Any] = list(losses)
        named = [dict(loss.named_parameters()) for loss in losses]
        buffers = [dict(loss.named_buffers()) for loss in losses]
        for tensors in (named, buffers):
            kinds = [{name: (t.shape, t.dtype, t.device) for name, t in own.items()} for own in tensors]
            if any(kind != kinds[0] for kind in kinds):
                raise NotJointError("the members differ in the names or shapes of their parameters")
        # that of the member which trains the most: a plain one keeps its noise
        self._shown = max(range(len(named)), key=lambda m: sum(p.requires_grad for p in named[m].values()))
        self._named, self._programs = named, {}  # type: ignore[var-annotated]
        self._stacked: dict[str, Tensor] = {}
        self._trained: dict[str, Tensor] = {}
        with torch.no_grad():
            for name in named[0]:
                own = [parameters[name] for parameters in named]
                stacked = torch.stack([p.detach() for p in own])
                trained = [p.requires_grad for p in own]
                self._stacked[name] = nn.Parameter(stacked, requires_grad=any(trained))
                if any(trained) and not all(trained):
                    mask = torch.tensor(trained, device=stacked.device).to(stacked.dtype)
                    self._trained[name] = mask.reshape(-1, *[1] * (stacked.dim() - 1))
                for m, p in enumerate(own):
                    p.data = stacked[m]
            self._buffers = {name: torch.stack([own[name] for own in buffers]) for name in buffers[0]}
        self.parameters = [p for p in self._stacked.values() if p.requires_grad]
        like = next(iter(self._stacked.values()))
        dtype = torch.promote_types(like.dtype, torch.float32)
        self._weight = torch.ones(len(self.losses), dtype=dtype, device=like.device)

    def backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The members' losses ``(M,)``; their gradients become those of the stacked parameters.

        :raises NotJointError: if the first batch of a shape cannot be captured, or gives other numbers.
        """
        tensors, spec = tree_flatten((args, kwargs))
        if not all(type(leaf) is Tensor for leaf in tensors):
            raise NotJointError("batches hold other things than tensors")
        same = tuple(map([id(t) for t in tensors].index, map(id, tensors)))  # one tensor for two arguments is one input
        key = (spec, same, *((t.shape, t.dtype) for t in tensors))
        if key not in self._programs:
            self._programs[key] = self._captured(args, kwargs, tensors)
        call, names, held = self._programs[key]
        self._set_weights()
        with torch.no_grad():
            losses, *gradients = call(self._weight, *tensors, *held)
        for name, gradient in zip(names, gradients, strict=True):
            mask = self._trained.get(name)
            # fused optimisers read a gradient as if it were contiguous, and those of several layers are slices
            self._stacked[name].grad = (gradient if mask is None else gradient * mask).contiguous()
        result: Tensor = losses
        return result

    def part(self) -> None:
        """Gives each member parameters of its own again."""
        for parameters in self._named:
            for p in parameters.values():
                p.data, p.grad = p.data.clone(), None

    def _set_weights(self) -> None:
        for m, loss in enumerate(self.losses):
            self._weight[m] = loss.elbo.current_weight()

    # ---- the program

    def _captured(
        self, args: Any, kwargs: Any, tensors: list[Tensor]
    ) -> tuple[Callable[..., Any], list[str], list[Tensor]]:
        from torch.fx.experimental.proxy_tensor import make_fx

        loss = self.losses[self._shown]
        known = {id(p): (self._stacked, name) for name, p in self._named[self._shown].items()}
        known |= {id(b): (self._buffers, name) for name, b in loss.named_buffers()}
        self._set_weights()
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            state, alone = torch.get_rng_state(), self._alone(args, kwargs)  # raises in the model's own words
            warnings.simplefilter("ignore")  # vmap warns of operators that it loops over
            try:
                program = Program(loss, args, kwargs, tensors)
                inputs = [self._weight[0], *tensors, *program.constants]
                graph = _functional(program.graph, inputs, 1 + len(program.parameters))
                places = [known.get(id(tensor)) for tensor in program.constants]
                held = [t if p is None else p[0][p[1]] for t, p in zip(program.constants, places, strict=True)]
                dims = (0, *[None] * len(tensors), *[None if place is None else 0 for place in places])
                names = [known[id(p)][1] for p in program.parameters]

                def mapped(randomness: str) -> Callable[..., Any]:
                    return lambda *values: torch.vmap(graph, in_dims=dims, randomness=randomness)(*values)

                with torch.no_grad():
                    stacked = [self._weight, *tensors, *held]
                    torch.set_rng_state(state)
                    losses, *gradients = mapped("same")(*stacked)
                    joint = dict(zip(names, gradients, strict=True))
                    for m, (value, own) in enumerate(alone):
                        if not close([(losses[m], value)]) or not close([(joint[n][m], g) for n, g in own.items()]):
                            raise NotJointError("a member's loss or gradients in the program are not its own")
                    joined: Any = make_fx(mapped("different"))(*stacked)
                    return replay(_simplified(joined), stacked), names, held
            except NotJointError:
                raise
            except Exception as error:  # whatever the model, the tracer or vmap raises
                raise NotJointError(first_line(error)) from error

    def _alone(self, args: Any, kwargs: Any) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Each member's own loss and gradients by name, from equal random states."""
        found, state = [], torch.get_rng_state()
        for loss, named in zip(self.losses, self._named, strict=True):
            trained = {name: p for name, p in named.items() if p.requires_grad}
            torch.set_rng_state(state)
            with steps_not_counted(loss.elbo):
                value = loss(*args, **kwargs)
                gradients = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
            own = {name: g for name, g in zip(trained, gradients, strict=True) if g is not None}
            found.append((value.detach(), own))
        return found


def _functional(graph: Any, inputs: list[Tensor], outputs: int) -> Any:
    """The graph's first outputs by operators that change nothing in place, for which vmap has rules."""
    from torch.fx.experimental.proxy_tensor import make_fx

    aten, functionalize = torch.ops.aten, torch.func.functionalize
    pure: Any = make_fx(lambda *values: functionalize(graph.forward, remove="mutations")(*values)[:outputs])(*inputs)
    for node in pure.graph.nodes:
        if node.target is aten.copy.default:
            node.replace_all_uses_with(node.args[1])
        elif node.target is aten.copy_.default:
            raise NotJointError("the network writes to its buffers (batch normalisation does)")
        elif node.target in (aten.convolution.default, aten.convolution_backward.default):
            raise NotJointError("convolutions of several networks at once take longer")
    pure.graph.eliminate_dead_code()
    pure.recompile()
    return pure.forward


def _simplified(graph: Any) -> Any:
    """Without operators that change no number: vmap adds a copy, an expansion and two views to each product."""
    aten = torch.ops.aten
    copies, views = (aten.clone.default, aten.alias.default), (aten.view.default, aten._unsafe_view.default)
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        shapes = [getattr(n.meta.get("val"), "shape", None) for n in (node, *node.all_input_nodes[:1])]
        unchanged = len(shapes) == 2 and shapes[0] == shapes[1]
        if node.target in copies or (unchanged and node.target in (*views, aten.expand.default)):
            node.replace_all_uses_with(node.args[0])
        elif node.target in views:
            node.target = torch.reshape
        elif node.target is aten.expand.default:
            node.target = torch.broadcast_to
    return graph
