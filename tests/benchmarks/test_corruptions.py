"""The fifteen corruptions: the same ones every time, within [0, 1], and each does something."""

import pytest
import torch

from benchmarks.corruptions import CORRUPTIONS, corrupted

# Of `images()`: the mean, and the mean product with Normal numbers. A change of these makes stored results invalid.
CHECKSUMS = {
    "shot noise": (0.12457, 0.00062),
    "impulse noise": (0.20782, 0.00348),
    "glass blur": (0.14195, -0.00080),
    "motion blur": (0.14178, -0.00161),
    "shear": (0.13929, 0.00005),
    "scale": (0.04139, -0.00114),
    "rotate": (0.14191, 0.00017),
    "translate": (0.13842, -0.00031),
    "brightness": (0.54435, -0.00574),
    "fog": (0.40612, -0.00545),
    "spatter": (0.19485, -0.00288),
    "stripe": (0.24590, -0.00328),
    "dotted line": (0.16444, -0.00046),
    "zigzag": (0.22064, -0.00274),
    "canny edges": (0.06059, 0.00079),
}


def images(side=28):
    """Rings, bars and blots of different sizes."""
    down, right = torch.meshgrid(*[torch.linspace(-1, 1, side)] * 2, indexing="ij")
    radius = torch.hypot(down, right)
    shapes = [(radius - 0.3 - 0.1 * size).abs() < 0.12 for size in range(4)]
    shapes += [((down - slope * right).abs() < 0.15) & (right.abs() < 0.7) for slope in (-0.5, 0.0, 0.5, 1.0)]
    blots = [(1 - radius / size).clamp(min=0) for size in (0.5, 0.7, 0.9, 1.1)]
    return torch.cat([torch.stack(shapes).float(), torch.stack(blots)])


def checksum(x):
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return float(x.mean()), float((x * weights).mean())


@pytest.fixture(autouse=True)
def float32():
    torch.set_default_dtype(torch.float32)


def test_there_are_fifteen():
    assert len(CORRUPTIONS) == 15
    assert list(CHECKSUMS) == list(CORRUPTIONS)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_checksum(name):
    assert checksum(corrupted(images(), name)) == pytest.approx(CHECKSUMS[name], abs=2e-5)


@pytest.mark.parametrize("side", [8, 28])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_an_image_stays_an_image(name, side):
    x = images(side)
    before = x.clone()
    found = corrupted(x, name)
    assert found.shape == x.shape
    assert found.dtype == x.dtype
    assert bool(((found >= 0) & (found <= 1)).all())
    assert torch.equal(x, before)
    assert (found - x).abs().mean() > 0.01


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_draws_come_from_the_seed_alone(name):
    state = torch.get_rng_state()
    first, second = corrupted(images(), name), corrupted(images(), name)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, corrupted(images(), name, seed=1)) == (name == "canny edges")
