"""Bad input: each message names the argument."""

import pytest
import torch

from pyro_vsd.distributions import (
    ColumnProduct,
    HouseholderNormal,
    ScaleMixtureNormal,
    StructuredDropout,
    beta_star,
    empirical_bayes_kl,
    hierarchical_kl,
)

NAN, INF = float("nan"), float("inf")
ones = torch.ones


def bad(value, *shape):
    tensor = torch.ones(shape)
    tensor.view(-1)[-1] = value
    return tensor


# What is called, and the argument that the message names.
CONSTRUCTIONS = {
    # alpha
    "noise: alpha zero": (lambda: HouseholderNormal(1.0, bad(0.0, 3)), "alpha"),
    "noise: alpha negative": (lambda: HouseholderNormal(1.0, bad(-1.0, 3)), "alpha"),
    "noise: alpha NaN": (lambda: HouseholderNormal(1.0, bad(NAN, 3)), "alpha"),
    "columns: alpha zero": (lambda: ColumnProduct(ones(3, 2), bad(0.0, 3)), "alpha"),
    "columns: alpha NaN": (lambda: ColumnProduct(ones(3, 2), bad(NAN, 3)), "alpha"),
    "dropout: alpha negative": (lambda: StructuredDropout(ones(3, 2), bad(-1.0, 3)), "alpha"),
    "noise: alpha is a number": (
        lambda: HouseholderNormal(1.0, torch.tensor(0.1)),
        "alpha",
    ),
    "noise: alpha whole": (lambda: HouseholderNormal(1.0, torch.ones(2).long()), "alpha"),
    "noise: alpha empty": (lambda: HouseholderNormal(1.0, ones(0)), "alpha"),
    "columns: alpha infinite": (lambda: ColumnProduct(ones(3, 2), bad(INF, 3)), "alpha"),
    # vectors
    "noise: vectors of a wrong K": (
        lambda: HouseholderNormal(1.0, ones(3), ones(2, 4)),
        "vectors",
    ),
    "noise: vectors of rank 1": (
        lambda: HouseholderNormal(1.0, ones(3), ones(3)),
        "vectors",
    ),
    "noise: vectors of a wrong dtype": (
        lambda: HouseholderNormal(1.0, ones(3), ones(2, 3, dtype=torch.float32)),
        "vectors",
    ),
    "noise: vectors NaN": (lambda: HouseholderNormal(1.0, ones(3), bad(NAN, 2, 3)), "vectors"),
    "noise: batches": (
        lambda: HouseholderNormal(1.0, ones(2, 3), ones(4, 1, 3)),
        "alpha|vectors",
    ),
    "noise: vectors infinite": (lambda: HouseholderNormal(1.0, ones(3), bad(INF, 2, 3)), "vectors"),
    # loc
    "noise: loc of a wrong K": (
        lambda: HouseholderNormal(ones(4), ones(3)),
        "loc",
    ),
    "noise: loc of a wrong batch": (
        lambda: HouseholderNormal(ones(4, 3), ones(2, 3)),
        "loc",
    ),
    "noise: loc NaN": (lambda: HouseholderNormal(bad(NAN, 3), ones(3)), "loc"),
    "noise: loc infinite": (lambda: HouseholderNormal(INF, ones(3)), "loc"),
    # theta
    "columns: theta of rank 1": (
        lambda: ColumnProduct(ones(3), ones(3)),
        "theta",
    ),
    "columns: event_dim too large": (
        lambda: ColumnProduct(ones(3, 2), ones(3), event_dim=3),
        "theta|event_dim",
    ),
    "columns: event_dim of a vector": (
        lambda: StructuredDropout(ones(3, 2), ones(3), event_dim=1),
        "theta|event_dim",
    ),
    "columns: theta of a wrong K": (
        lambda: ColumnProduct(ones(4, 2), ones(3)),
        "alpha|theta",
    ),
    "columns: theta NaN": (
        lambda: ColumnProduct(bad(NAN, 3, 2), ones(3)),
        "theta",
    ),
    "columns: theta infinite": (
        lambda: StructuredDropout(bad(INF, 3, 2), ones(3)),
        "theta",
    ),
    "columns: theta of a wrong batch": (
        lambda: ColumnProduct(ones(4, 3, 2), ones(2, 3)),
        "theta|alpha",
    ),
    # noise_dim
    "columns: noise_dim too large": (
        lambda: ColumnProduct(ones(3, 2), ones(3), noise_dim=2),
        "noise_dim",
    ),
    "columns: noise_dim too small": (
        lambda: StructuredDropout(ones(3, 2), ones(3), noise_dim=-3),
        "noise_dim",
    ),
    "columns: noise_dim no integer": (
        lambda: StructuredDropout(ones(3, 2), ones(3), noise_dim="in"),
        "noise_dim",
    ),
    "columns: noise_dim in a batch": (
        lambda: ColumnProduct(ones(4, 3, 2), ones(4, 3), noise_dim=-3),
        "noise_dim",
    ),
    # scale
    "dropout: scale of a wrong K": (
        lambda: StructuredDropout(ones(3, 2), ones(3), scale=ones(2)),
        "scale",
    ),
    "dropout: scale is a number": (
        lambda: StructuredDropout(ones(3, 2), ones(3), scale=torch.tensor(1.0)),
        "scale",
    ),
    "dropout: scale negative": (
        lambda: StructuredDropout(ones(3, 2), ones(3), scale=bad(-2.0, 3)),
        "scale",
    ),
    "dropout: scale NaN": (
        lambda: StructuredDropout(ones(3, 2), ones(3), scale=bad(NAN, 3)),
        "scale",
    ),
    "dropout: scale of a wrong batch": (
        lambda: StructuredDropout(ones(2, 3, 2), ones(2, 3), scale=ones(4, 3)),
        "scale",
    ),
    # priors
    "mixture: z of a wrong K": (
        lambda: ScaleMixtureNormal(ones(2), -2, (3, 2)),
        "z",
    ),
    "mixture: z is a number": (
        lambda: ScaleMixtureNormal(torch.tensor(1.0), -2, (3, 2)),
        "z",
    ),
    "mixture: z negative": (
        lambda: ScaleMixtureNormal(bad(-1.0, 3), -2, (3, 2)),
        "z",
    ),
    "mixture: z NaN": (lambda: ScaleMixtureNormal(bad(NAN, 3), -2, (3, 2)), "z"),
    "mixture: beta negative": (
        lambda: ScaleMixtureNormal(ones(3), -2, (3, 2), beta=-1.0),
        "beta",
    ),
    "mixture: beta does not broadcast": (
        lambda: ScaleMixtureNormal(ones(3), -2, (3, 2), beta=ones(3)),
        "beta",
    ),
    "mixture: empirical_bayes": (
        lambda: ScaleMixtureNormal(ones(3), -2, (3, 2), beta="best"),
        "beta",
    ),
    "mixture: no noise_dim": (
        lambda: ScaleMixtureNormal(ones(3), None, (3, 2)),
        "noise_dim",
    ),
    # functions
    "empirical Bayes: alpha zero": (
        lambda: empirical_bayes_kl(bad(0.0, 3), None, 2),
        "alpha",
    ),
    "empirical Bayes: alpha NaN": (
        lambda: empirical_bayes_kl(bad(NAN, 3), None, 2),
        "alpha",
    ),
    "empirical Bayes: alpha infinite": (lambda: empirical_bayes_kl(bad(INF, 3), None, 2), "alpha"),
    "empirical Bayes: alpha is a number": (
        lambda: empirical_bayes_kl(torch.tensor(1.0), None, 2),
        "alpha",
    ),
    "empirical Bayes: vectors": (
        lambda: empirical_bayes_kl(ones(3), ones(2, 4), 2),
        "vectors",
    ),
    "empirical Bayes: vectors NaN": (
        lambda: empirical_bayes_kl(ones(3), bad(NAN, 2, 3), 2),
        "vectors",
    ),
    "empirical Bayes: batches": (
        lambda: empirical_bayes_kl(ones(2, 3), ones(4, 1, 3), 2),
        "alpha|vectors",
    ),
    "empirical Bayes: no columns": (
        lambda: empirical_bayes_kl(ones(3), None, 0),
        "num_columns",
    ),
    "empirical Bayes: columns are a tensor": (
        lambda: empirical_bayes_kl(ones(3), None, ones(3)),
        "num_columns",
    ),
    "empirical Bayes: no number of columns": (lambda: empirical_bayes_kl(ones(3), None, None), "num_columns"),
    "beta_star: theta NaN": (lambda: beta_star(bad(NAN, 3, 2), ones(3)), "theta"),
    "beta_star: theta of a wrong K": (
        lambda: beta_star(ones(4, 2), ones(3)),
        "alpha|theta",
    ),
    "beta_star: noise_dim": (lambda: beta_star(ones(3, 2), ones(3), noise_dim=2), "noise_dim"),
    "beta_star: rank 1": (lambda: beta_star(ones(3), ones(3)), "theta"),
    "beta_star: alpha": (
        lambda: beta_star(ones(3, 2), bad(-1.0, 3)),
        "alpha",
    ),
    "hierarchical: z_loc of a wrong K": (
        lambda: hierarchical_kl(ones(3), None, ones(2), ones(3), 2),
        "z_loc",
    ),
    "hierarchical: z_loc NaN": (
        lambda: hierarchical_kl(ones(3), None, bad(NAN, 3), ones(3), 2),
        "z_loc",
    ),
    "hierarchical: z_scale zero": (
        lambda: hierarchical_kl(ones(3), None, ones(3), bad(0.0, 3), 2),
        "z_scale",
    ),
    "hierarchical: z_scale of a wrong K": (
        lambda: hierarchical_kl(ones(3), None, ones(3), ones(1, 4), 2),
        "z_scale",
    ),
    "hierarchical: batches": (
        lambda: hierarchical_kl(ones(2, 3), None, ones(4, 3), ones(3), 2),
        "alpha|z_loc",
    ),
    "hierarchical: beta": (
        lambda: hierarchical_kl(ones(3), None, ones(3), ones(3), 2, "best"),
        "beta",
    ),
    # a density where there is none
    "log_prob: zero in theta": (
        lambda: ColumnProduct(bad(0.0, 3, 2), ones(3)).log_prob(ones(3, 2)),
        "theta",
    ),
    "entropy: zero in theta": (
        lambda: StructuredDropout(bad(0.0, 3, 2), ones(3)).entropy(),
        "theta",
    ),
    "log_prob: value of a wrong shape": (
        lambda: ColumnProduct(ones(3, 2), ones(3)).log_prob(ones(3, 3)),
        "value",
    ),
    "log_prob: value NaN": (lambda: HouseholderNormal(1.0, ones(3)).log_prob(bad(NAN, 3)), "value"),
}


@pytest.mark.parametrize(("call", "argument"), CONSTRUCTIONS.values(), ids=CONSTRUCTIONS.keys())
def test_bad_input(call, argument):
    with pytest.raises(ValueError, match=rf"\b({argument})\b"):
        call()


# A number or None where a tensor is wanted.
NO_TENSORS = {
    "noise: alpha": (lambda: HouseholderNormal(1.0, 0.5), "alpha"),
    "dropout: theta": (lambda: StructuredDropout(None, ones(3)), "theta"),
    "dropout: scale": (lambda: StructuredDropout(ones(3, 2), ones(3), scale=1.0), "scale"),
    "mixture: z": (lambda: ScaleMixtureNormal(1.0, -1, (2, 2)), "z"),
    "hierarchical: z_loc": (lambda: hierarchical_kl(ones(3), None, None, ones(3), 1), "z_loc"),
    "beta_star: theta": (lambda: beta_star(1.0, ones(3)), "theta"),
}


@pytest.mark.parametrize(("call", "argument"), NO_TENSORS.values(), ids=NO_TENSORS.keys())
def test_no_tensor(call, argument):
    with pytest.raises(TypeError, match=rf"\b{argument}\b"):
        call()


def test_a_zero_weight_is_no_error_where_no_density_is_asked_for():
    law = StructuredDropout(bad(0.0, 3, 2), ones(3))
    assert law.rsample().dense()[-1, -1] == 0
    assert law.variance[-1, -1] == 0


@pytest.mark.parametrize("law", [ColumnProduct, StructuredDropout])
def test_checks_of_values_can_be_switched_off(law):
    law(bad(NAN, 3, 2), bad(-1.0, 3), validate_args=False)
