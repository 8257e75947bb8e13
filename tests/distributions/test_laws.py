"""Every law of the package, one test per property, on one table of cases."""

import copy
import io
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import scipy.stats
import torch
from pyro import poutine
from pyro.distributions.testing.gof import auto_goodness_of_fit, unif01_goodness_of_fit
from torch.distributions import constraints
from torch.testing import assert_close

from pyro_vsd.distributions import HouseholderNormal, StructuredDropout
from pyro_vsd.ops.noise import noise_terms
from tests.distributions.cases import CASES, COLUMN_CASES, dense_draw

EXACT = {"rtol": 1e-8, "atol": 1e-8}
# One chance in ten thousand for each p-value; seeds are fixed.
GOF_LEVEL = 1e-4

on_every_case = pytest.mark.parametrize("case", CASES, ids=str)
on_column_cases = pytest.mark.parametrize("case", COLUMN_CASES, ids=str)
SAMPLE_SHAPES = pytest.mark.parametrize("sample_shape", [(), (5,), (3, 2)], ids=str)


@on_every_case
def test_support_is_real_with_the_rank_of_the_event(case):
    law = case.build()
    assert law.support.event_dim == law.event_dim == case.event_dim
    assert isinstance(law.support, constraints.independent)
    assert law.support.check(law.sample()).shape == case.batch_shape
    assert law.support.check(law.sample()).all()
    assert law.has_rsample


@on_every_case
def test_batch_and_event_shape(case):
    law = case.build()
    assert law.batch_shape == case.batch_shape
    assert law.event_shape == case.event_shape
    assert law.shape() == case.batch_shape + case.event_shape


@on_every_case
@SAMPLE_SHAPES
def test_shapes_of_draws_and_densities(case, sample_shape):
    law = case.build()
    assert law.rsample(sample_shape).shape == sample_shape + case.batch_shape + case.event_shape
    assert law.sample(sample_shape).shape == sample_shape + case.batch_shape + case.event_shape
    assert law.log_prob(law.sample(sample_shape)).shape == sample_shape + case.batch_shape
    assert law.log_prob(torch.ones(case.event_shape)).shape == case.batch_shape


@on_every_case
def test_shapes_of_moments(case):
    law = case.build()
    assert law.mean.shape == law.variance.shape == law.stddev.shape == case.batch_shape + case.event_shape
    assert law.entropy().shape == case.batch_shape


@on_every_case
@SAMPLE_SHAPES
def test_log_prob_equals_the_dense_twin(case, sample_shape):
    value = case.value(*sample_shape)
    assert_close(case.build().log_prob(value), case.twin(case.params).log_prob(value), **EXACT)


@on_every_case
def test_gradients_of_log_prob_equal_the_dense_twin(case):
    params, value = case.leaves(), case.value(5).requires_grad_()
    weight = torch.randn((5,) + case.batch_shape)
    inputs = [value, *(p for p in params.values() if p.numel())]
    ours = torch.autograd.grad((case.build(params).log_prob(value) * weight).sum(), inputs)
    twin = torch.autograd.grad((case.twin(params).log_prob(value) * weight).sum(), inputs)
    assert_close(ours, twin, **EXACT)


@on_every_case
def test_moments_equal_the_dense_twin(case):
    law, twin = case.build(), case.twin(case.params)
    assert_close(law.mean, twin.mean, **EXACT)
    assert_close(law.variance, twin.variance, **EXACT)


@on_every_case
def test_entropy_equals_the_dense_twin(case):
    assert_close(case.build().entropy(), case.twin(case.params).entropy(), **EXACT)


@on_every_case
def test_gradients_of_moments_and_entropy_equal_the_dense_twin(case):
    params = case.leaves()

    def total(law):
        return law.mean.square().sum() + law.variance.log1p().sum() + law.entropy().sum()

    inputs = [p for p in params.values() if p.numel()]
    ours = torch.autograd.grad(total(case.build(params)), inputs, allow_unused=True)
    twin = torch.autograd.grad(total(case.twin(params)), inputs, allow_unused=True)
    assert_close(
        [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, ours, strict=True)], list(twin), **EXACT
    )


@on_every_case
def test_moments_of_draws(case):
    law = case.build()
    draws = dense_draw(law, (20_000,))
    # Five standard errors of a mean, and of the variance of a Gaussian.
    error = (law.variance / len(draws)).sqrt()
    assert ((draws.mean(0) - law.mean).abs() < 5 * error).all()
    assert ((draws.var(0) - law.variance).abs() < 5 * law.variance * (2 / len(draws)) ** 0.5).all()


@on_every_case
def test_gradcheck(case):
    names = [name for name, value in case.params.items() if value.numel()]
    value = case.value(2)

    def function(*tensors):
        law = case.build({**case.params, **dict(zip(names, tensors, strict=True))}, validate_args=False)
        torch.manual_seed(1)
        return law.log_prob(value), dense_draw(law, (2,)), law.variance, law.entropy()

    leaves = case.leaves()
    assert torch.autograd.gradcheck(function, tuple(leaves[name] for name in names), check_undefined_grad=False)


@on_every_case
@pytest.mark.parametrize("kind", [torch.Size, tuple, list])
def test_expand(case, kind):
    law = case.build()
    wide = law.expand(kind((5,) + case.batch_shape))
    assert type(wide) is type(law)
    assert isinstance(wide.batch_shape, torch.Size)
    assert wide.batch_shape == (5,) + case.batch_shape
    assert wide.event_shape == case.event_shape
    value = case.value(5)
    assert_close(wide.log_prob(value), law.log_prob(value))
    assert dense_draw(wide, (2,)).shape == (2, 5) + case.batch_shape + case.event_shape
    assert_close(wide.mean, law.mean.expand(wide.shape()))
    assert_close(wide.variance, law.variance.expand(wide.shape()))
    assert_close(wide.entropy(), law.entropy().expand(wide.batch_shape))


@on_every_case
def test_expand_twice_and_leave_the_first_alone(case):
    law = case.build()
    once = law.expand((5,) + case.batch_shape)
    twice = once.expand((2, 5) + case.batch_shape)
    assert type(twice) is type(law)
    assert law.batch_shape == case.batch_shape
    assert once.batch_shape == (5,) + case.batch_shape
    assert twice.batch_shape == (2, 5) + case.batch_shape
    value = case.value()
    assert_close(twice.log_prob(value), law.log_prob(value).expand(twice.batch_shape))
    draws = dense_draw(twice)
    assert (draws[0] != draws[1]).any()


@on_every_case
def test_expand_keeps_the_choice_of_validation(case):
    bad = torch.full(case.batch_shape + case.event_shape, torch.nan)
    assert case.build(validate_args=False).expand((2,) + case.batch_shape).log_prob(bad).isnan().all()
    with pytest.raises(ValueError, match=r"\bvalue\b"):
        case.build(validate_args=True).expand((2,) + case.batch_shape).log_prob(bad)


@on_every_case
def test_expand_to_a_shape_that_does_not_fit(case):
    wide = case.build().expand((5,) + case.batch_shape)
    with pytest.raises(ValueError, match=r"\bexpand\b"):
        wide.expand((2,) + case.batch_shape)


@on_every_case
def test_an_expanded_law_draws_independently(case):
    draws = dense_draw(case.build().expand((3,) + case.batch_shape))
    assert (draws[0] != draws[1]).any()


def used(law):
    """After a draw and a density: what is cached is cached."""
    law.log_prob(law.rsample())
    return law


def through_pickle(law):
    return pickle.loads(pickle.dumps(law))


def through_torch_save(law):
    buffer = io.BytesIO()
    torch.save(law, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@on_every_case
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, through_pickle, through_torch_save])
def test_copies(case, duplicate):
    law = used(case.build(case.leaves()))
    twin = duplicate(law)
    value = case.value()
    assert type(twin) is type(law)
    assert (twin.batch_shape, twin.event_shape) == (law.batch_shape, law.event_shape)
    assert_close(twin.log_prob(value), law.log_prob(value))
    torch.manual_seed(3)
    draw = dense_draw(law)
    torch.manual_seed(3)
    assert_close(dense_draw(twin), draw)


@on_every_case
def test_a_draw_without_gradients_first_costs_no_gradients_later(case):
    params = case.leaves()
    law = case.build(params)
    law.log_prob(law.sample()).sum()
    with torch.no_grad():
        law.log_prob(law.rsample())
    law.log_prob(case.value()).sum().backward()
    assert all(p.grad is not None for p in params.values() if p.numel())
    again = case.leaves()
    draw = dense_draw(used(case.build(again)))
    assert draw.requires_grad


@on_every_case
def test_sample_has_no_gradient(case):
    law = case.build(case.leaves())
    assert not law.sample().requires_grad
    assert law.rsample().requires_grad


SELF_CONSISTENT = [case for case in CASES if case.law is not StructuredDropout]


# Nearest neighbours tell a density in few dimensions only.
@pytest.mark.parametrize("case", [c for c in SELF_CONSISTENT if math.prod(c.event_shape) <= 3], ids=str)
def test_goodness_of_fit(case):
    law = case.build()
    draws = law.sample((4000,))
    density = law.log_prob(draws).exp()
    at = (slice(None),) + (0,) * len(case.batch_shape)
    assert auto_goodness_of_fit(draws[at].reshape(len(draws), -1), density[at]) > GOF_LEVEL


@pytest.mark.parametrize("case", SELF_CONSISTENT, ids=str)
def test_goodness_of_fit_of_the_log_density(case):
    """Twice the fall of a Gaussian's log-density from its top is chi-squared, in any number of dimensions."""
    law = case.build()
    fall = 2 * (law.log_prob(law.mean) - law.log_prob(law.sample((4000,))))
    at = (slice(None),) + (-1,) * len(case.batch_shape)
    uniform = torch.from_numpy(scipy.stats.chi2(math.prod(case.event_shape)).cdf(fall[at].numpy()))
    assert unif01_goodness_of_fit(uniform) > GOF_LEVEL


@pytest.mark.parametrize("case", [c for c in COLUMN_CASES if c.law is StructuredDropout], ids=str)
def test_goodness_of_fit_of_a_column(case):
    """The marginal of a column under q_t is q*'s: :class:`StructuredDropout` has no joint density."""
    twin = case.twin(case.params)
    draws = case.build().sample((4000,)).dense().movedim(twin.noise_dim, -1)
    draws = draws.flatten(1 + len(case.batch_shape), -2)[..., -1, :]  # the last column
    column = torch.distributions.MultivariateNormal(
        twin.columns.loc[..., -1, :], covariance_matrix=twin.columns.covariance_matrix[..., -1, :, :]
    )
    at = (slice(None),) + (0,) * len(case.batch_shape)
    assert auto_goodness_of_fit(draws[at][:, :3], marginal(column, 3).log_prob(draws[..., :3])[at].exp()) > GOF_LEVEL


def marginal(law, size):
    """The law of the first entries of a Gaussian vector."""
    return torch.distributions.MultivariateNormal(
        law.loc[..., :size], covariance_matrix=law.covariance_matrix[..., :size, :size]
    )


@on_every_case
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)], ids=["float32", "bfloat16"]
)
def test_dtypes(case, dtype, tolerance):
    law, twin = case.build(case.to(dtype)), case.build({k: v.double() for k, v in case.to(dtype).items()})
    draw = dense_draw(law, (5,))
    assert draw.dtype == law.rsample().dtype == law.sample().dtype == dtype
    assert law.mean.dtype == law.variance.dtype == dtype
    for ours, exact in ((law.mean, twin.mean), (law.variance, twin.variance), (law.entropy(), twin.entropy())):
        assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance)
    near = (twin.mean + 0.1).to(dtype)
    assert_close(law.log_prob(near).double(), twin.log_prob(near.double()), rtol=tolerance, atol=tolerance)


@on_every_case
def test_inside_a_plate_and_a_trace(case):
    law = case.build()

    def model():
        with pyro.plate("p", 5, dim=-len(case.batch_shape) - 1):
            return pyro.sample("w", law)

    trace = poutine.trace(model).get_trace()
    trace.compute_log_prob()
    site = trace.nodes["w"]
    assert type(site["fn"]) is type(law)
    assert site["value"].shape == (5,) + case.batch_shape + case.event_shape
    assert site["log_prob"].shape == (5,) + case.batch_shape
    assert_close(site["log_prob"], law.log_prob(site["value"]))
    trace.format_shapes()


@on_every_case
def test_mask_and_to_event(case):
    law = case.build()
    value = case.value()
    assert (law.mask(False).log_prob(value) == 0).all()
    assert_close(law.to_event(len(case.batch_shape)).log_prob(value), law.log_prob(value).sum())


@on_every_case
def test_expand_by(case):
    law = case.build()
    assert type(law.expand_by((2,))) is type(law)
    assert law.expand_by((2,)).batch_shape == (2,) + case.batch_shape


@on_every_case
def test_repr_names_the_law(case):
    assert type(case.build()).__name__ in repr(case.build())


@on_column_cases
def test_units_and_columns_are_counted(case):
    law, twin = case.build(), case.twin(case.params)
    assert law.noise_dim == twin.noise_dim
    assert law.num_units == case.params["alpha"].shape[-1]
    assert law.num_columns * law.num_units == law.event_shape.numel()
    assert isinstance(law.noise, HouseholderNormal)
    assert_close(law.unit_variance, law.noise.variance)


@pytest.mark.parametrize("case", [c for c in CASES if c.law is HouseholderNormal], ids=str)
def test_covariance_matrix(case):
    law, twin = case.build(), case.twin(case.params)
    assert_close(law.covariance_matrix, twin.law.covariance_matrix, **EXACT)
    draws = law.rsample((40_000,)).reshape(40_000, -1, case.event_shape[0])
    centred = draws - law.mean.reshape(draws.shape[1:])
    empirical = torch.einsum("sbi,sbj->bij", centred, centred) / len(draws)
    assert_close(empirical, law.covariance_matrix.reshape(empirical.shape), rtol=0, atol=0.05)


@pytest.mark.parametrize("alpha", [1e-12, 1e-6, 1.0, 1e6, 1e12])
@pytest.mark.parametrize("loc", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_and_densities_for_extreme_alpha(alpha, loc, dtype):
    law = HouseholderNormal(loc, torch.full((4,), alpha, dtype=dtype), torch.randn(2, 4, dtype=dtype))
    # equal alphas: whatever U is, this is N(loc, alpha I)
    twin = dist.Normal(loc, alpha**0.5).expand((4,)).to_event(1)
    value = loc + alpha**0.5 * torch.randn(3, 4)
    assert_close(law.entropy().double(), twin.entropy(), rtol=1e-5, atol=1e-5)
    if dtype == torch.float64:
        assert_close(law.log_prob(value), twin.log_prob(value), rtol=1e-6, atol=1e-6)
    if loc == 0 or dtype == torch.float64:
        draws = law.rsample((4000,)).double()
        assert_close(draws.var(0) / alpha, torch.ones(4), rtol=0, atol=0.15)


def test_a_zero_vector_is_no_reflection():
    alpha, vectors = torch.rand(4) + 0.1, torch.randn(2, 4)
    padded = torch.cat([vectors[:1], torch.zeros(1, 4), vectors[1:]]).requires_grad_()
    law = HouseholderNormal(1.0, alpha, padded)
    value = torch.randn(3, 4)
    assert_close(law.log_prob(value), HouseholderNormal(1.0, alpha, vectors).log_prob(value), **EXACT)
    (law.log_prob(value).sum() + law.rsample().sum() + law.variance.sum()).backward()
    assert torch.isfinite(padded.grad).all()
    assert (padded.grad[1] == 0).all()


@pytest.mark.parametrize("norm", [1e-20, 1e20])
def test_extreme_norms_in_float32(norm):
    direction, alpha = torch.randn(2, 4), torch.rand(4, dtype=torch.float32) + 0.1
    vectors = (direction * norm).to(torch.float32).requires_grad_()
    theta = torch.ones(4, 2, dtype=torch.float32, requires_grad=True)
    law = StructuredDropout(theta, alpha, vectors)
    value = torch.rand(4, 2, dtype=torch.float32) + 0.5
    twin = StructuredDropout(theta.double(), alpha.double(), direction)
    assert_close(law.log_prob(value).double(), twin.log_prob(value.double()), rtol=1e-4, atol=1e-4)
    (law.log_prob(value) + law.rsample().dense().sum() + law.variance.sum()).backward()
    assert torch.isfinite(vectors.grad).all()


@on_column_cases
def test_expected_density_under_q_t_is_that_under_q_star(case):
    """E_{q_t}[log q*] = E_{q*}[log q*]: scoring draws of q_t under q* is unbiased."""
    law = case.build()
    log_density = law.log_prob(dense_draw(law, (20_000,)))
    error = log_density.std(0) / len(log_density) ** 0.5
    assert ((log_density.mean(0) + law.entropy()).abs() < 5 * error).all()


@pytest.mark.parametrize("scale", [False, True])
def test_a_law_from_terms_is_the_law_of_its_parameters(scale):
    """The way of a guide: terms are at hand, nothing is checked."""
    theta, log_alpha, vectors = torch.randn(2, 3), torch.randn(3), torch.randn(2, 3)
    z = torch.rand(4, 1, 3) + 0.1 if scale else None
    terms = noise_terms(log_alpha, vectors)
    made = StructuredDropout(theta, log_alpha.exp(), vectors, -1, z, terms=terms, validate_args=False)
    plain = StructuredDropout(theta, log_alpha.exp(), vectors, -1, z)
    value = torch.randn(2, 3)
    for law, twin in ((made, plain), (made.expand((4, 4)), plain.expand((4, 4))), (copy.deepcopy(made), plain)):
        assert (law.batch_shape, law.event_shape) == (twin.batch_shape, twin.event_shape)
        for name in ("alpha", "mean", "variance", "unit_variance"):
            assert_close(getattr(law, name), getattr(twin, name))
        assert_close(law.log_prob(value), twin.log_prob(value))
        assert_close(law.entropy(), twin.entropy())
        assert_close(law.terms.log_ratio, twin.terms.log_ratio)
        torch.manual_seed(1)
        draw = law.rsample().dense()
        torch.manual_seed(1)
        assert_close(draw, twin.rsample().dense())


def test_a_law_from_terms_first_used_without_gradients():
    theta, log_alpha, vectors = torch.randn(2, 3), torch.randn(3, requires_grad=True), torch.randn(2, 3)
    terms = noise_terms(log_alpha, vectors)
    law = StructuredDropout(theta, log_alpha.exp(), vectors, -1, terms=terms, validate_args=False)
    with torch.no_grad():
        law.alpha, law.sample()
    assert law.alpha.requires_grad
    assert law.entropy().requires_grad
