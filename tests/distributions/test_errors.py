"""Bad input: each message says what was expected and what came."""

import pytest
import torch

from pyro_vsd.distributions import (
    ColumnProduct,
    HouseholderNormal,
    ScaleMixtureNormal,
    StructuredDropout,
    WeightNormal,
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


# What is called, and what the message says.
CONSTRUCTIONS = {
    # alpha
    "noise: alpha zero": (lambda: HouseholderNormal(1.0, bad(0.0, 3)), "Expected parameter alpha"),
    "noise: alpha negative": (lambda: HouseholderNormal(1.0, bad(-1.0, 3)), "Expected parameter alpha"),
    "noise: alpha NaN": (lambda: HouseholderNormal(1.0, bad(NAN, 3)), "Expected parameter alpha"),
    "columns: alpha zero": (lambda: ColumnProduct(ones(3, 2), bad(0.0, 3)), "Expected parameter alpha"),
    "columns: alpha NaN": (lambda: ColumnProduct(ones(3, 2), bad(NAN, 3)), "Expected parameter alpha"),
    "dropout: alpha negative": (lambda: StructuredDropout(ones(3, 2), bad(-1.0, 3)), "Expected parameter alpha"),
    "noise: alpha is a number": (
        lambda: HouseholderNormal(1.0, torch.tensor(0.1)),
        r"alpha: expected a shape \(\.\.\., K\), got \(\)",
    ),
    # vectors
    "noise: vectors of another K": (
        lambda: HouseholderNormal(1.0, ones(3), ones(2, 4)),
        r"vectors: expected a shape \(\.\.\., T, 3\) to fit alpha of shape \(3,\), got \(2, 4\)",
    ),
    "noise: vectors of rank 1": (
        lambda: HouseholderNormal(1.0, ones(3), ones(3)),
        r"vectors: expected a shape \(\.\.\., T, 3\).*got \(3,\)",
    ),
    "noise: vectors of another dtype": (
        lambda: HouseholderNormal(1.0, ones(3), ones(2, 3, dtype=torch.float32)),
        r"vectors: expected the dtype of alpha, torch.float64, got torch.float32",
    ),
    "noise: vectors NaN": (lambda: HouseholderNormal(1.0, ones(3), bad(NAN, 2, 3)), "Expected parameter vectors"),
    "noise: batches": (
        lambda: HouseholderNormal(1.0, ones(2, 3), ones(4, 1, 3)),
        r"expected batch shapes that broadcast, got alpha \(2, 3\) and vectors \(4, 1, 3\)",
    ),
    # loc
    "noise: loc of another K": (
        lambda: HouseholderNormal(ones(4), ones(3)),
        r"loc: expected a number or a shape that broadcasts with \(3,\), got \(4,\)",
    ),
    "noise: loc of another batch": (
        lambda: HouseholderNormal(ones(4, 3), ones(2, 3)),
        r"loc: expected .* \(2, 3\), got \(4, 3\)",
    ),
    "noise: loc NaN": (lambda: HouseholderNormal(bad(NAN, 3), ones(3)), "Expected parameter loc"),
    # theta
    "columns: theta of rank 1": (
        lambda: ColumnProduct(ones(3), ones(3)),
        r"theta: expected a weight of rank 2 or more, got shape \(3,\)",
    ),
    "columns: event_dim too large": (
        lambda: ColumnProduct(ones(3, 2), ones(3), event_dim=3),
        r"theta: expected .* got shape \(3, 2\) with event_dim 3",
    ),
    "columns: event_dim of a vector": (
        lambda: StructuredDropout(ones(3, 2), ones(3), event_dim=1),
        r"theta: expected .* got shape \(3, 2\) with event_dim 1",
    ),
    "columns: theta of another K": (
        lambda: ColumnProduct(ones(4, 2), ones(3)),
        r"alpha: expected 4 noise units, the size of theta \(4, 2\) along noise_dim -2, got shape \(3,\)",
    ),
    "columns: theta NaN": (
        lambda: ColumnProduct(bad(NAN, 3, 2), ones(3)),
        r"theta: expected finite values, got nan in a tensor of shape \(3, 2\)",
    ),
    "columns: theta infinite": (
        lambda: StructuredDropout(bad(INF, 3, 2), ones(3)),
        r"theta: expected finite values, got inf in a tensor of shape \(3, 2\)",
    ),
    "columns: theta of another batch": (
        lambda: ColumnProduct(ones(4, 3, 2), ones(2, 3)),
        r"expected batch shapes that broadcast, got theta \(4, 3, 2\) with event_dim 2, alpha \(2, 3\)",
    ),
    # noise_dim
    "columns: noise_dim too large": (
        lambda: ColumnProduct(ones(3, 2), ones(3), noise_dim=2),
        r"noise_dim: expected an axis of the event \(3, 2\), from -2 to 1, got 2",
    ),
    "columns: noise_dim too small": (
        lambda: StructuredDropout(ones(3, 2), ones(3), noise_dim=-3),
        r"noise_dim: expected an axis of the event \(3, 2\), from -2 to 1, got -3",
    ),
    "columns: noise_dim no integer": (
        lambda: StructuredDropout(ones(3, 2), ones(3), noise_dim="in"),
        r"noise_dim: expected an axis .* got 'in'",
    ),
    "columns: noise_dim in a batch": (
        lambda: ColumnProduct(ones(4, 3, 2), ones(4, 3), noise_dim=-3),
        r"noise_dim: expected an axis of the event \(3, 2\), from -2 to 1, got -3",
    ),
    # scale
    "dropout: scale of another K": (
        lambda: StructuredDropout(ones(3, 2), ones(3), scale=ones(2)),
        r"scale: expected a shape \(\.\.\., 3\), got \(2,\)",
    ),
    "dropout: scale is a number": (
        lambda: StructuredDropout(ones(3, 2), ones(3), scale=torch.tensor(1.0)),
        r"scale: expected a shape \(\.\.\., 3\), got \(\)",
    ),
    "dropout: scale negative": (
        lambda: StructuredDropout(ones(3, 2), ones(3), scale=bad(-2.0, 3)),
        r"scale: expected positive finite values, got -2.0 in a tensor of shape \(3,\)",
    ),
    "dropout: scale NaN": (
        lambda: StructuredDropout(ones(3, 2), ones(3), scale=bad(NAN, 3)),
        r"scale: expected positive finite values, got nan",
    ),
    "dropout: scale of another batch": (
        lambda: StructuredDropout(ones(2, 3, 2), ones(2, 3), scale=ones(4, 3)),
        r"scale: expected a batch shape that broadcasts with \(2,\), got a tensor of shape \(4, 3\)",
    ),
    # priors
    "prior: scale negative": (lambda: WeightNormal(-1.0, (3, 2)), r"scale: expected positive finite values, got -1.0"),
    "prior: scale NaN": (lambda: WeightNormal(NAN, (3, 2)), r"scale: expected positive finite values, got nan"),
    "prior: scale does not broadcast": (
        lambda: WeightNormal(ones(3), (3, 2)),
        r"scale: expected a number or a tensor that broadcasts to the weight's shape \(3, 2\), got shape \(3,\)",
    ),
    "prior: scale of higher rank": (
        lambda: WeightNormal(ones(4, 3, 2), (3, 2)),
        r"scale: expected .* got shape \(4, 3, 2\)",
    ),
    "prior: shape of rank 1": (
        lambda: WeightNormal(1.0, (3,)),
        r"shape: expected a weight of rank 2 or more, got \(3,\)",
    ),
    "prior: noise_dim": (lambda: WeightNormal(1.0, (3, 2), noise_dim=2), r"noise_dim: expected an axis .* got 2"),
    "prior: input_dim": (
        lambda: WeightNormal(1.0, (3, 2), input_dim=5),
        r"input_dim: expected an axis of the event \(3, 2\), from -2 to 1, got 5",
    ),
    "prior: init": (lambda: WeightNormal(1.0, (3, 2), init=ones(2, 3)), r"init: expected shape \(3, 2\), got \(2, 3\)"),
    "mixture: z of another K": (
        lambda: ScaleMixtureNormal(ones(2), -2, (3, 2)),
        r"z: expected one entry for each of the 3 noise units, got shape \(2,\)",
    ),
    "mixture: z is a number": (
        lambda: ScaleMixtureNormal(torch.tensor(1.0), -2, (3, 2)),
        r"z: expected .* got shape \(\)",
    ),
    "mixture: z negative": (
        lambda: ScaleMixtureNormal(bad(-1.0, 3), -2, (3, 2)),
        r"z: expected positive finite values, got -1.0",
    ),
    "mixture: z NaN": (lambda: ScaleMixtureNormal(bad(NAN, 3), -2, (3, 2)), r"z: expected positive finite .* got nan"),
    "mixture: beta negative": (
        lambda: ScaleMixtureNormal(ones(3), -2, (3, 2), beta=-1.0),
        r"beta: expected positive finite values, got -1.0",
    ),
    "mixture: beta does not broadcast": (
        lambda: ScaleMixtureNormal(ones(3), -2, (3, 2), beta=ones(3)),
        r"beta: expected a number or a tensor that broadcasts to the weight's shape \(3, 2\), got shape \(3,\)",
    ),
    "mixture: empirical_bayes": (
        lambda: ScaleMixtureNormal(ones(3), -2, (3, 2), empirical_bayes="best"),
        r"empirical_bayes: expected 'paper' or 'full', got 'best'",
    ),
    "mixture: no noise_dim": (
        lambda: ScaleMixtureNormal(ones(3), None, (3, 2)),
        r"noise_dim: expected the axis of the weight \(3, 2\) along which z runs, got None",
    ),
    # functions
    "empirical Bayes: alpha zero": (
        lambda: empirical_bayes_kl(bad(0.0, 3), None, 2),
        r"alpha: expected positive finite values, got 0.0 in a tensor of shape \(3,\)",
    ),
    "empirical Bayes: alpha NaN": (
        lambda: empirical_bayes_kl(bad(NAN, 3), None, 2),
        "alpha: expected positive .* got nan",
    ),
    "empirical Bayes: alpha infinite": (lambda: empirical_bayes_kl(bad(INF, 3), None, 2), "alpha: expected .* got inf"),
    "empirical Bayes: alpha is a number": (
        lambda: empirical_bayes_kl(torch.tensor(1.0), None, 2),
        r"alpha: expected a shape \(\.\.\., K\), got \(\)",
    ),
    "empirical Bayes: vectors": (
        lambda: empirical_bayes_kl(ones(3), ones(2, 4), 2),
        r"vectors: expected .* got \(2, 4\)",
    ),
    "empirical Bayes: vectors NaN": (
        lambda: empirical_bayes_kl(ones(3), bad(NAN, 2, 3), 2),
        r"vectors: expected finite values, got nan in a tensor of shape \(2, 3\)",
    ),
    "empirical Bayes: batches": (
        lambda: empirical_bayes_kl(ones(2, 3), ones(4, 1, 3), 2),
        "expected batch shapes that broadcast",
    ),
    "empirical Bayes: no columns": (
        lambda: empirical_bayes_kl(ones(3), None, 0),
        "num_columns: expected a positive number, got 0",
    ),
    "empirical Bayes: columns are a tensor": (
        lambda: empirical_bayes_kl(ones(3), None, ones(3)),
        "num_columns: expected a positive number, got tensor",
    ),
    "beta_star: theta of another K": (
        lambda: beta_star(ones(4, 2), ones(3)),
        r"alpha: expected 4 noise units, .* got shape \(3,\)",
    ),
    "beta_star: noise_dim": (lambda: beta_star(ones(3, 2), ones(3), noise_dim=2), "noise_dim: expected .* got 2"),
    "beta_star: rank 1": (lambda: beta_star(ones(3), ones(3)), "theta: expected a weight of rank 2 or more, got shape"),
    "beta_star: alpha": (
        lambda: beta_star(ones(3, 2), bad(-1.0, 3)),
        "alpha: expected positive finite values, got -1.0",
    ),
    "hierarchical: z_loc of another K": (
        lambda: hierarchical_kl(ones(3), None, ones(2), ones(3), 2),
        r"z_loc: expected a shape \(\.\.\., 3\), got \(2,\)",
    ),
    "hierarchical: z_loc NaN": (
        lambda: hierarchical_kl(ones(3), None, bad(NAN, 3), ones(3), 2),
        "z_loc: expected finite values, got nan",
    ),
    "hierarchical: z_scale zero": (
        lambda: hierarchical_kl(ones(3), None, ones(3), bad(0.0, 3), 2),
        "z_scale: expected positive finite values, got 0.0",
    ),
    "hierarchical: z_scale of another K": (
        lambda: hierarchical_kl(ones(3), None, ones(3), ones(1, 4), 2),
        r"z_scale: expected a shape \(\.\.\., 3\), got \(1, 4\)",
    ),
    "hierarchical: batches": (
        lambda: hierarchical_kl(ones(2, 3), None, ones(4, 3), ones(3), 2),
        r"expected batch shapes that broadcast, got alpha \(2, 3\), z_loc \(4, 3\) and z_scale \(3,\)",
    ),
    "hierarchical: beta": (
        lambda: hierarchical_kl(ones(3), None, ones(3), ones(3), 2, "best"),
        "beta: expected 'paper' or 'full', got 'best'",
    ),
    # a density where there is none
    "log_prob: zero in theta": (
        lambda: ColumnProduct(bad(0.0, 3, 2), ones(3)).log_prob(ones(3, 2)),
        r"log_prob: expected a theta without zeros, got 1 zero\(s\) in shape \(3, 2\)",
    ),
    "entropy: zero in theta": (
        lambda: StructuredDropout(bad(0.0, 3, 2), ones(3)).entropy(),
        r"entropy: expected a theta without zeros, got 1 zero\(s\) in shape \(3, 2\)",
    ),
    "log_prob: value of another shape": (
        lambda: ColumnProduct(ones(3, 2), ones(3)).log_prob(ones(3, 3)),
        "size of value must match event_shape",
    ),
    "log_prob: value NaN": (lambda: HouseholderNormal(1.0, ones(3)).log_prob(bad(NAN, 3)), "within the support"),
}


@pytest.mark.parametrize(("call", "message"), CONSTRUCTIONS.values(), ids=CONSTRUCTIONS.keys())
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_zero_weight_is_no_error_where_no_density_is_asked_for():
    law = StructuredDropout(bad(0.0, 3, 2), ones(3))
    assert law.rsample().dense()[-1, -1] == 0
    assert law.variance[-1, -1] == 0


@pytest.mark.parametrize("law", [ColumnProduct, StructuredDropout])
def test_checks_of_values_can_be_switched_off(law):
    law(bad(NAN, 3, 2), bad(-1.0, 3), validate_args=False)
