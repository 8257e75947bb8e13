"""Training runs that go wrong on purpose, small enough to run many of them."""

import warnings
from typing import Any

import torch

import pyro_vsd as vsd

# What is changed against a healthy training run, and the finding that names it.
SICK: dict[str, tuple[dict[str, Any], str]] = {
    "collapsed": ({"kl_weight": 1e-4, "init_alpha": 1e-4, "log_alpha_lr": 0.1}, "alpha_collapsed"),
    "exploded": ({"init_alpha": 100.0, "log_alpha_lr": 1e-4}, "alpha_exploded"),
    "swamped": ({"kl_weight": 300.0}, "kl_swamps"),
    "num_data": ({"num_data": 50}, "num_data"),
}


def classes(num_rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three classes on rings, in five inputs of which two matter, with some wrong labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, 5, generator=generator)
    y = (x[:, :2].norm(dim=-1) > 0.9).long() + (x[:, :2].norm(dim=-1) > 1.6).long()
    wrong = torch.rand(num_rows, generator=generator) < 0.03
    return x, torch.where(wrong, torch.randint(3, (num_rows,), generator=generator), y)


def train(seed, *, num_data=1000, kl_weight=1.0, epochs=30, log_alpha_lr=0.03, **options):
    """Model, guide, objective, data and held-out data after a training run with batches of 50."""
    torch.manual_seed(seed)
    data, held_out = classes(1000, seed), classes(500, seed + 1000)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([5, 30, 3])), num_data=num_data)
    guide, elbo = vsd.VSDGuide(model, **options), vsd.VSD_ELBO(kl_weight=kl_weight)
    optimizer = torch.optim.Adam(guide.parameter_groups(lr=0.03, log_alpha=log_alpha_lr))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fit warns of a wrong num_data, too
        vsd.fit(
            model, guide, data, epochs=epochs, batch_size=50, optimizer=optimizer, elbo=elbo, seed=seed, progress=False
        )
    return model, guide, elbo, data, held_out
