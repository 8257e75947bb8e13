"""LoRA adapters, Bayesian: noise between the two factors of each adapter."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pyro_vsd.distributions.layers import MODULES
from pyro_vsd.nn.bayesian_network import BayesianNetwork, WeightSite, bayesianize
from pyro_vsd.nn.priors import GaussianPrior, Prior

__all__ = ["bayesianize_lora"]


def bayesianize_lora(
    model: nn.Module,
    prior: Prior | torch.distributions.Distribution = GaussianPrior(1.0),  # noqa: B008 (frozen)
    adapters: str | Sequence[str] | None = None,
    inplace: bool = False,
) -> BayesianNetwork:
    r"""Makes the LoRA adapters of a ``peft`` model random: :func:`bayesianize` of all ``lora_B`` weights.

    .. math:: W = W_0 + s\, B \operatorname{diag}(\xi) A, \qquad \xi \sim N(1, U \operatorname{diag}(\alpha) U^\top)

    The noise has as many units as the adapter has ranks r, so a site adds (1 + T) r parameters. The base stays frozen.
    A, and all else that ``peft`` trains (``modules_to_save``), is trained as a plain parameter.

    :param model: what ``peft.get_peft_model`` returns, or a network with such layers inside.
    :param prior: as for :func:`bayesianize`.
    :param adapters: names of adapters; by default all that are trained (``requires_grad``).
    :param inplace: as for :func:`bayesianize`.

    .. code-block:: python

        net = peft.get_peft_model(encoder, peft.LoraConfig(r=8, target_modules=["query", "value"]))
        model = vsd.nn.Classifier(vsd.nn.bayesianize_lora(net), num_data=len(train))
    """
    found = list(_factors(model))
    if not found:
        raise ValueError(
            "model has no LoRA adapters of Linear or convolution layers. Add some with peft.get_peft_model, or use "
            "vsd.nn.bayesianize for other networks."
        )
    names = [adapters] if isinstance(adapters, str) else adapters
    unknown = sorted(set(names or ()) - {name for _, _, name, _ in found})
    if unknown:
        raise ValueError(f"adapters: there is no {unknown}, only {sorted({name for _, _, name, _ in found})}.")
    chosen = [row for row in found if names is None or row[2] in names]
    for path, layer, name, factor in chosen:
        _check(path, layer, name, factor)
    paths = {f"{path}.lora_B.{name}" for path, _, name, factor in chosen if _is_trained(factor)}
    if not paths or (names is not None and len(paths) < len(chosen)):
        raise ValueError(
            "adapters: they are frozen. Load them with PeftModel.from_pretrained(…, is_trainable=True), or make them "
            "active with model.set_adapter(name)."
        )
    network = bayesianize(model, prior, include=lambda path, _: path in paths, inplace=inplace)
    network.weight_sites[:] = [_noise_on_ranks(site, paths) for site in network.weight_sites]
    return network


def _noise_on_ranks(site: WeightSite, paths: set[str]) -> WeightSite:
    """A convolution's adapter has its noise between the factors, too: on input channels."""
    if not isinstance(site.noise_dim, dict) or not paths & {key.removesuffix(".weight") for key in site.keys}:
        return site
    axis = site.noise_dim["in"]
    return replace(site, noise_dim=axis, scale_dim=axis)


def _factors(model: nn.Module) -> Iterator[tuple[str, Any, str, nn.Module]]:
    """Path and layer, adapter and its ``lora_B``, of all LoRA layers."""
    for path, layer in model.named_modules():
        if isinstance(getattr(layer, "lora_B", None), nn.ModuleDict):
            for name, factor in layer.lora_B.items():
                yield path, layer, name, factor


def _is_trained(factor: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in factor.parameters())


def _check(path: str, layer: Any, name: str, factor: nn.Module) -> None:
    """Raises where the output is not that of ``lora_B`` applied to the output of ``lora_A``."""
    if getattr(layer, "merged", False):
        raise ValueError(f"model: the adapters of {path} are merged into its weight. Call model.unmerge_adapter().")
    if isinstance(getattr(layer, "base_layer", None), nn.MultiheadAttention):
        raise ValueError(
            f"model: {path} is an nn.MultiheadAttention, into whose weights peft merges the adapter in each call, so "
            "that they do not stay as they are. Leave it out of target_modules."
        )
    if name in getattr(layer, "lora_variant", {}):
        kind = type(layer.lora_variant[name]).__name__.removesuffix("Variant")
        raise ValueError(
            f"model: {path} is a variant of LoRA ({kind}), which uses its factors for more than their product. Use a "
            "plain LoraConfig."
        )
    if not isinstance(factor, MODULES):
        raise ValueError(
            f"model: lora_B of {path} is a {type(factor).__name__}, which hides the product with its weight. Quantise "
            "the base model only, before peft.get_peft_model."
        )
