import pytest
import torch

from pyro_vsd.datasets import cubic, two_clusters

TOYS = [
    pytest.param(cubic, lambda x: x**3, id="cubic"),
    pytest.param(two_clusters, lambda x: torch.cos(4 * x + 0.8), id="two_clusters"),
]


@pytest.mark.parametrize(("make", "function"), TOYS)
def test_shapes_and_function(make, function):
    train, test = make(30, num_test=50)
    assert (train.x.shape, train.y.shape) == ((30, 1), (30,))
    assert (test.x.shape, test.y.shape) == ((50, 1), (50,))
    torch.testing.assert_close(test.y, function(test.x.squeeze(-1)))


@pytest.mark.parametrize(("make", "function"), TOYS)
@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_noise_has_the_stated_standard_deviation(make, function, noise):
    train, _ = make(20_000, noise=noise)
    residual = train.y - function(train.x.squeeze(-1))
    # The relative error of a standard deviation from n draws is 1 / sqrt(2 n) = 0.5 %: six of these.
    assert abs(residual.std().item() - noise) <= 0.03 * noise


@pytest.mark.parametrize(("make", "function"), TOYS)
def test_seed_and_dtype(make, function):
    state = torch.get_rng_state()
    assert torch.equal(make(seed=1)[0].x, make(seed=1)[0].x)
    assert not torch.equal(make(seed=1)[0].x, make(seed=2)[0].x)
    assert torch.equal(make(dtype=torch.float32)[0].x, make()[0].x.float())
    assert torch.equal(torch.get_rng_state(), state)


def test_cubic_is_the_papers():
    train, test = cubic()
    assert len(train) == 20
    assert train.x.abs().max() <= 4
    assert test.x.max() > 4
    many, _ = cubic(20_000)
    assert many.x.min() < -3.99
    assert many.x.max() > 3.99


def test_two_clusters_leave_a_gap_that_the_test_grid_fills():
    train, test = two_clusters(101)
    left = train.x < 0
    assert left.sum() == 50
    assert (train.x[left].min() >= -1) & (train.x[left].max() <= -0.7)
    assert (train.x[~left].min() >= 0.5) & (train.x[~left].max() <= 1)
    assert ((test.x > -0.7) & (test.x < 0.5)).sum() > 10
