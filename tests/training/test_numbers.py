"""Numbers at the edge: finite loss, gradients and predictions, or a clear error of ours; never a silent NaN."""

import pytest
import torch

import pyro_vsd as vsd
from tests.training import cases

DTYPES = [torch.float64, torch.float32]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float64", "float32"])


def regressor(sizes=(3, 5, 1)):
    return vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp(list(sizes))), num_data=cases.N, noise=0.5)


def steps(model, guide, x, dtype):
    """Loss, gradients, a step of Adam, and a prediction."""
    model.to(dtype), guide.to(dtype)
    x, y = x.to(dtype), torch.linspace(-1, 1, len(x), dtype=dtype)
    elbo = vsd.VSD_ELBO()
    loss = elbo(model, guide)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    value = loss(x, y)
    elbo.check_finite()
    value.backward()
    assert bool(value.isfinite())
    for name, parameter in loss.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
    optimizer.step()
    prediction = vsd.predict(model, guide, x, num_samples=3, seed=0)
    assert bool(prediction.mean.isfinite().all())
    assert bool(prediction.variance.isfinite().all())
    assert all(bool(p.isfinite().all()) for p in loss.parameters())


@every_dtype
@pytest.mark.parametrize("prior", [vsd.nn.GaussianPrior(), vsd.nn.HierarchicalPrior()], ids=["gaussian", "hierarchy"])
@pytest.mark.parametrize("alpha", [1e-12, 1e-6, 1.0, 1e6, 1e12])
def test_noise_variances(alpha, prior, dtype):
    model = cases.regressor(noise=0.5, prior=prior)
    steps(model, vsd.VSDGuide(model, init_alpha=alpha), cases.data().x, dtype)


@every_dtype
@pytest.mark.parametrize("vectors", [{}, {"vectors": "fc"}, {"vectors": "low_rank", "rank": 2}], ids=str)
@pytest.mark.parametrize("scale", [1e-20, 1e-10, 1e10, 1e20])
def test_vectors_of_any_length(scale, vectors, dtype):
    model = regressor()
    steps(model, vsd.VSDGuide(model, init_vector_scale=scale, **vectors), cases.data().x, dtype)


def parallel(value):
    value[1:] = -3 * value[:1]


def nearly_parallel(value):
    value[1:] = value[:1] * (1 + torch.finfo(value.dtype).eps)


EDITS = {
    "parallel": ("vectors", parallel),
    "nearly": ("vectors", nearly_parallel),
    "zero-vectors": ("vectors", lambda value: value.zero_()),
    "theta-row": ("theta", lambda value: value[0].zero_()),
    "theta": ("theta", lambda value: value.zero_()),
    "theta-huge": ("theta", lambda value: value.mul_(1e8)),
}


@every_dtype
@pytest.mark.parametrize("edit", EDITS)
def test_degenerate_parameters(edit, dtype):
    model = regressor()
    guide = vsd.VSDGuide(model).to(dtype)
    role, change = EDITS[edit]
    with torch.no_grad():
        for value in getattr(guide, role).parameters():
            change(value)
    steps(model, guide, cases.data().x, dtype)


@every_dtype
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e10, 1e18])
def test_inputs_of_any_size(scale, dtype):
    model = regressor()
    steps(model, vsd.VSDGuide(model), scale * cases.data().x, dtype)


@pytest.mark.parametrize(("scale", "value"), [(1e30, "inf"), (float("nan"), "nan"), (float("inf"), "nan|inf")])
def test_inputs_that_are_too_much(scale, value):
    model = regressor()
    with pytest.raises(ValueError, match=f"({value}).*'y'"):
        steps(model, vsd.VSDGuide(model), scale * cases.data().x, torch.float32)


@every_dtype
@pytest.mark.parametrize("reflections", [0, 1, 2, 5])
@pytest.mark.parametrize(("rows", "sizes"), [(1, (3, 5, 1)), (1, (1, 1, 1)), (24, (1, 1))])
def test_one_example_and_one_unit(rows, sizes, reflections, dtype):
    model = regressor(sizes)
    steps(model, vsd.VSDGuide(model, num_reflections=reflections), torch.ones(rows, sizes[0]), dtype)


def test_a_million_units():
    K = 1_000_000
    model = vsd.nn.Regressor(vsd.nn.bayesianize(torch.nn.Linear(K, 1)), num_data=cases.N, noise=0.5)
    steps(model, vsd.VSDGuide(model), torch.randn(2, K) / 1000, torch.float32)


def test_many_adam_steps_in_single_precision():
    """Two thousand steps at a high rate: whatever the parameters do, nothing becomes NaN."""
    model = regressor()
    guide = vsd.VSDGuide(model)
    model.float(), guide.float()
    data = cases.data().to(torch.float32)
    elbo = vsd.VSD_ELBO()
    loss = elbo(model, guide)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.1)
    for _ in range(2000):
        optimizer.zero_grad()
        loss(data.x, data.y).backward()
        optimizer.step()
    elbo.check_finite()
    assert all(bool(p.isfinite().all()) for p in loss.parameters())
