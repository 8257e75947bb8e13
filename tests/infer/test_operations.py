"""The work of a step, counted and not timed: operations of torch beside those of the plain network, and nothing of the
size of a dense draw or of K × K. Times are in ``benchmarks/README.md``.

pyro#361, pyro#1063, CEVAE-pyro#1: there small models are dominated by overhead.
"""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pyro_vsd as vsd

SIZES = [60, 50, 40, 10]
B = 20


class Count(TorchDispatchMode):
    """Operations by name, and the shapes of what they made."""

    def __init__(self):
        super().__init__()
        self.names: Counter[str] = Counter()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names[func.overloadpacket.__name__] += 1
        if isinstance(result, torch.Tensor):
            self.shapes[tuple(result.shape)] += 1
        return result


def plain_step():
    net = vsd.nn.mlp(SIZES)
    x, y = torch.randn(B, 60), torch.arange(B) % 10
    with Count() as count:
        nn.functional.cross_entropy(net(x), y).backward()
    return count


def vsd_step(num_reflections=2, **options):
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp(SIZES)), num_data=100)
    loss = vsd.VSD_ELBO(**options)(model, vsd.VSDGuide(model, num_reflections=num_reflections))
    x, y = torch.randn(B, 60), torch.arange(B) % 10
    loss(x, y).backward()  # plates are counted in the first call
    loss.zero_grad()
    with Count() as count:
        loss(x, y).backward()
    return count


def test_operations_of_a_step():
    """49 and 271 were counted, most of them on T × K numbers; the bound leaves room for some more."""
    plain, ours = (sum(count.names.values()) for count in (plain_step(), vsd_step()))
    assert ours <= 6 * plain


def test_large_products_are_those_of_the_plain_network():
    """Two more for the noise of each layer, one more for the gradient of the first layer's input, which noise needs."""

    def products(count):
        return sum(count.names[name] for name in ("mm", "addmm", "addmm_"))

    layers = len(SIZES) - 1
    assert products(vsd_step(num_reflections=0)) <= products(plain_step()) + 1 + 2 * layers


@pytest.mark.parametrize("num_reflections", [1, 5, 10])
def test_operations_do_not_grow_with_the_reflections(num_reflections):
    """From three on; one or two need one operator less."""
    counts = [sum(vsd_step(T).names.values()) for T in (3, num_reflections)]
    assert counts[1] <= counts[0]


def test_normals_are_drawn_once_a_layer():
    names = vsd_step().names
    assert sum(names[name] for name in names if name.startswith(("randn", "normal"))) == len(SIZES) - 1


def test_nothing_is_as_large_as_a_dense_draw_or_a_covariance():
    """No draw per example ``(B, Q, K)``, no ``K × K``; a weight's own shape at most twice more often than in the plain
    network (views for autograd; torch 2.4 makes one more), where a dense draw and its gradient would make it
    four times more."""
    plain, ours = plain_step(), vsd_step()
    largest = max(Q * K for K, Q in zip(SIZES[:-1], SIZES[1:], strict=True))
    assert max(torch.Size(shape).numel() for shape in ours.shapes) == largest
    assert not [shape for shape in ours.shapes if len(shape) >= 2 and shape[-1] == shape[-2] and shape[-1] >= 40]
    made = {shape: (plain.shapes[shape], ours.shapes[shape]) for shape in [(50, 60), (40, 50), (10, 40)]}
    views = 3 if torch.__version__.startswith("2.4.") else 2
    assert all(here <= there + views for there, here in made.values()), made


def test_vectorised_particles_cost_no_more_operations():
    try:
        with Count():
            (torch.ones(1) + 1).as_subclass(nn.Parameter)
    except RuntimeError:
        pytest.skip("this version of torch marks no tensor while operations are counted")
    one, many = vsd_step(), vsd_step(num_particles=10, vectorize_particles=True)
    assert sum(many.names.values()) < 1.2 * sum(one.names.values())
