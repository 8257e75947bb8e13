"""How strongly the loss bends in the noise of each weight."""

from collections.abc import Iterator
from typing import Any

import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal

from pyro_vsd._utils import base_distribution, evaluation_mode, num_rows
from pyro_vsd.distributions import LazyWeight
from pyro_vsd.prediction.collect import row_distribution

__all__ = ["curvature", "curvature_or_reason"]

# Up to this many classes each counts with its probability; beyond, this many labels are drawn. Each is a backward pass.
_PASSES = 32


def curvature(model: Any, guide: Any, *args: Any, max_units: int = 512, **kwargs: Any) -> dict[str, Tensor]:
    r"""Gauss–Newton matrix of the loss in the noise of each weight, ``{site: (K, K)}``, in float64.

    .. math:: A = \frac NB \sum_{n=1}^B J_n^\top H_n J_n, \qquad J_n = \partial f_n / \partial \xi_n,

    at noise drawn from the guide, one draw for each row, with H the Fisher matrix of the likelihood. Exact in the
    likelihood for a Normal, a Bernoulli and up to 32 classes, at one backward pass for each output; otherwise from 32
    drawn labels. Weights are left out if they are not used row by row (recurrent layers), lie in plates, or have more
    than ``max_units`` noise units. Draws come from torch's global generator.

    :param model: a Pyro model, which runs in evaluation mode.
    :param guide: its guide, set up.
    :param args: arguments of the model, targets included; the rows come first in every tensor.

    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=100)
    >>> A = curvature(model, vsd.VSDGuide(model), torch.randn(20, 4), torch.zeros(20, dtype=torch.long))
    >>> {site: tuple(matrix.shape) for site, matrix in A.items()}
    {'net.0.weight': (4, 4), 'net.2.weight': (8, 8)}
    """
    return curvature_or_reason(model, guide, args, kwargs, max_units)[0]


def curvature_or_reason(
    model: Any, guide: Any, args: Any, kwargs: Any, max_units: int, num_labels: int | None = None, wide: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The matrices, and for each weight without one the reason.

    :param num_labels: from so many drawn labels, where that takes fewer backward passes than the exact matrix.
    :param wide: whether weights of more than ``max_units`` have the diagonal of theirs, ``(K,)``.
    """
    rows = num_rows((args, kwargs))
    reasons: dict[str, str] = {}
    with torch.enable_grad(), evaluation_mode(model):
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        draws = {n: s["value"].draw for n, s in guide_trace.nodes.items() if isinstance(s.get("value"), LazyWeight)}
        leaves: dict[str, Tensor] = {}
        for name, draw in draws.items():
            if draw.batch_shape:
                reasons[name] = "this weight is in a plate"
            elif draw.num_units > max_units and not wide:
                reasons[name] = f"this weight has {draw.num_units} noise units, more than max_units={max_units}"
            else:
                leaf = draw.rows(rows)  # (B, K), the noise that the network will use
                leaves[name] = leaf if leaf.requires_grad else leaf.requires_grad_()
        model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs)
        for name in list(leaves):
            if draws[name].source.examples != {rows} or draws[name].source.used_dense:
                reasons[name] = "all rows share a draw of this weight"
                del leaves[name]
        shapes = {name: (leaf.shape[-1],) * (1 if leaf.shape[-1] > max_units else 2) for name, leaf in leaves.items()}
        totals = {name: leaf.new_zeros(shapes[name]).double() for name, leaf in leaves.items()}
        for site in model_trace.nodes.values():
            if not leaves or site["type"] != "sample" or not site["is_observed"]:
                continue
            # the weight of each row in the objective: the scale of plates, 0 where masked
            scale = torch.as_tensor(1.0 if site["scale"] is None else site["scale"]).double()
            scale = (scale * torch.as_tensor(True if site["mask"] is None else site["mask"])).expand(rows)
            for output, weight in _directions(row_distribution(site["fn"], rows), num_labels):
                grads = torch.autograd.grad(output.sum(), [*leaves.values()], retain_graph=True, materialize_grads=True)
                for (name, total), grad in zip(totals.items(), grads, strict=True):
                    z = draws[name].scale
                    slope = grad if z is None else grad * z  # in ξ; the rows are z ⊙ ξ
                    weighted = slope * (weight * scale).to(slope.dtype).unsqueeze(-1)
                    total += weighted.mT @ slope if total.dim() == 2 else (weighted * slope).sum(0)
    return {name: total.detach() for name, total in totals.items()}, reasons


def _directions(likelihood: Any, num_labels: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of an output of each row and its weight, ``(B,)`` both. The Fisher matrix is the weighted sum of the outer
    products of the outputs' gradients. With ``num_labels`` there are no more pairs than that."""
    base = base_distribution(likelihood)
    passes = num_labels or _PASSES
    plain = len(likelihood.batch_shape) == 1
    if plain and likelihood is base and isinstance(base, Categorical) and base.probs.shape[-1] <= passes:
        for column in base.logits.log_softmax(-1).unbind(-1):
            yield column, column.detach().exp()
    elif plain and likelihood is base and isinstance(base, Bernoulli):
        probs = base.probs.detach()
        yield base.logits, probs * (1 - probs)
    elif plain and isinstance(base, Normal) and base.loc.dim() <= 2 and _few_outputs(base, num_labels):
        loc, scale = (t.reshape(len(t), -1) for t in (base.loc, base.scale.expand_as(base.loc)))
        for mean, sigma in zip(loc.unbind(-1), scale.unbind(-1), strict=True):
            yield mean, sigma.detach() ** -2
            if sigma.requires_grad:
                yield sigma.log(), torch.full_like(sigma, 2.0)
    else:
        for _ in range(passes):
            density = likelihood.log_prob(likelihood.sample())
            by_row = density.reshape(len(density), -1).sum(-1)
            yield by_row, torch.full_like(by_row.detach(), 1 / passes)


def _few_outputs(normal: Normal, num_labels: int | None) -> bool:
    outputs = normal.loc[0].numel() * (2 if normal.scale.requires_grad and normal.scale.dim() == 2 else 1)
    return num_labels is None or outputs <= num_labels
