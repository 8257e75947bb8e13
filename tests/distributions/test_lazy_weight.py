"""The lazy weight: noise per example in layers, one dense draw everywhere else."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import pyro_vsd as vsd
from pyro_vsd.distributions import LazyWeight, StructuredDropout, lazy_weight
from pyro_vsd.distributions.layers import LAYERS as LAYER_TABLE
from pyro_vsd.distributions.layers import layer_of
from pyro_vsd.distributions.lazy_weight import ParticleTensor
from tests import dense
from tests.distributions.layers import LAYERS, Layer, make_law

EXACT = {"rtol": 1e-10, "atol": 1e-10}
on_every_layer = pytest.mark.parametrize("layer", LAYERS, ids=str)
BATCH = 5


def leaves(law):
    tensors = [law.theta, law.alpha, law.vectors] + ([] if law.scale is None else [law.scale])
    return [t.requires_grad_() for t in tensors]


# ---- layers


@on_every_layer
def test_each_example_meets_its_own_weight(layer):
    law, x, bias = layer.law(), torch.randn(BATCH, *layer.input_shape), layer.bias()
    weight = law.rsample()
    out = layer.call(x, weight, bias)
    rows = weight.draw.rows(BATCH)
    assert rows.shape == (BATCH, law.num_units)
    loop = [layer.call(x[b : b + 1], layer.dense_weight(law, rows[b]), bias) for b in range(BATCH)]
    assert_close(out, torch.cat(loop), **EXACT)
    assert not weight.draw.source.used_dense


@on_every_layer
def test_gradients_of_each_example_equal_those_of_the_dense_loop(layer):
    law, x, bias = layer.law(scale=True), torch.randn(BATCH, *layer.input_shape, requires_grad=True), layer.bias()
    inputs = [*leaves(law), x] + ([] if bias is None else [bias.requires_grad_()])
    weight = law.rsample()
    out = layer.call(x, weight, bias)
    rows = weight.draw.rows(BATCH)
    loop = torch.cat([layer.call(x[b : b + 1], layer.dense_weight(law, rows[b]), bias) for b in range(BATCH)])
    upstream = torch.randn_like(out)
    ours = torch.autograd.grad((out * upstream).sum(), inputs, retain_graph=True)
    assert_close(ours, torch.autograd.grad((loop * upstream).sum(), inputs), **EXACT)


@on_every_layer
def test_coherent_equals_the_dense_draw(layer):
    law, x, bias = layer.law(scale=True), torch.randn(BATCH, *layer.input_shape, requires_grad=True), layer.bias()
    inputs = [*leaves(law), x] + ([] if bias is None else [bias.requires_grad_()])
    weight = law.rsample()
    with vsd.coherent():
        out = layer.call(x, weight, bias)
    twin = layer.call(x, weight.dense(), bias)
    assert_close(out, twin, **EXACT)
    upstream = torch.randn_like(out)
    ours = torch.autograd.grad((out * upstream).sum(), inputs, retain_graph=True)
    assert_close(ours, torch.autograd.grad((twin * upstream).sum(), inputs), **EXACT)


@on_every_layer
def test_identical_examples_get_different_noise(layer):
    x = torch.randn(layer.input_shape).expand(BATCH, *layer.input_shape)
    out = layer.call(x, layer.law().rsample(), layer.bias())
    assert (out[0] != out[1]).any()


@on_every_layer
def test_a_draw_used_twice_uses_the_same_noise(layer):
    weight, x, bias = layer.law().rsample(), torch.randn(BATCH, *layer.input_shape), layer.bias()
    assert_close(layer.call(x, weight, bias), layer.call(x, weight, bias), rtol=0, atol=0)
    assert (layer.call(x, weight, bias) != layer.call(x, layer.law().rsample(), bias)).any()


UNBATCHED = [
    layer
    for layer in LAYERS
    if not any(word in layer.name for word in ("mm(", "addmm", "torch.mm", "sequences", "grids"))
]


@pytest.mark.parametrize("layer", UNBATCHED, ids=str)
def test_an_unbatched_input_is_one_example(layer):
    law, x, bias = layer.law(), torch.randn(layer.input_shape), layer.bias()
    weight = law.rsample()
    out = layer.call(x, weight, bias)
    assert_close(out, layer.call(x, layer.dense_weight(law, weight.draw.rows(1)[0]), bias), **EXACT)
    assert_close(out, layer.call(x.unsqueeze(0), weight, bias)[0], **EXACT)


# Axes counted from the left would be those of particles.
on_layers_of_particles = pytest.mark.parametrize(
    "layer", [x for x in LAYERS if not any(w in x.name for w in ("(0, 1)", "torch.transpose", "swapaxes"))], ids=str
)


@on_layers_of_particles
@pytest.mark.parametrize("particles", [(3, 1), (3,), (2, 3, 1)], ids=str)
def test_particles_equal_a_loop(layer, particles):
    """What vectorised particles make of an input is what each particle makes of it."""
    law, x, bias = layer.law(), torch.randn(BATCH, *layer.input_shape), layer.bias()
    weight = law.expand(particles).rsample()
    assert weight.shape == particles + layer.weight_shape
    out = layer.call(x, weight, bias)
    rows = weight.draw.rows(BATCH)
    rows = rows.flatten(0, -3)
    loop = torch.stack(
        [
            torch.cat([layer.call(x[b : b + 1], layer.dense_weight(law, row[b]), bias) for b in range(BATCH)])
            for row in rows
        ]
    )
    assert out.shape == (particles if particles[-1] > 1 else particles[:-1]) + loop.shape[1:]
    assert_close(out.as_subclass(torch.Tensor).reshape(loop.shape), loop, **EXACT)
    assert not weight.draw.source.used_dense


@pytest.mark.parametrize(
    "layer", [x for x in UNBATCHED if not any(w in x.name for w in ("(0, 1)", "torch.transpose", "swapaxes"))], ids=str
)
@pytest.mark.parametrize("particles", [(3, 1), (3,)], ids=str)
def test_particles_of_an_unbatched_input(layer, particles):
    law, x, bias = layer.law(), torch.randn(layer.input_shape), layer.bias()
    weight = law.expand(particles).rsample()
    out = layer.call(x, weight, bias)
    loop = torch.stack([layer.call(x, layer.dense_weight(law, row[0]), bias) for row in weight.draw.rows(1)])
    assert out.shape == particles + loop.shape[1:]
    assert_close(out.as_subclass(torch.Tensor).reshape(loop.shape), loop, **EXACT)


@on_layers_of_particles
@pytest.mark.parametrize("particles", [(3, 1), (3,)], ids=str)
def test_coherent_particles_equal_a_loop(layer, particles):
    law, x, bias = layer.law(), torch.randn(BATCH, *layer.input_shape), layer.bias()
    weight = law.expand(particles).rsample()
    with vsd.coherent():
        out = layer.call(x, weight, bias)
    loop = torch.stack([layer.call(x, w, bias) for w in weight.dense().flatten(0, -len(layer.weight_shape) - 1)])
    assert_close(out.as_subclass(torch.Tensor), loop, **EXACT)


WITH_BIAS = [layer for layer in LAYERS if layer.bias_size and "keywords" not in layer.name and "mm" not in layer.name]


@pytest.mark.parametrize("layer", [layer for layer in WITH_BIAS if "@" not in layer.name], ids=str)
@pytest.mark.parametrize("particles", [(3, 1), (3,)], ids=str)
def test_a_sampled_bias_has_particles_of_its_own(layer, particles):
    law, x, bias = layer.law(), torch.randn(BATCH, *layer.input_shape), layer.bias(*particles)
    weight = law.expand(particles).rsample()
    with vsd.coherent():
        out = layer.call(x, weight, bias)
    weights, biases = weight.dense().flatten(0, -len(layer.weight_shape) - 1), bias.reshape(3, -1)
    loop = torch.stack([layer.call(x, w, b) for w, b in zip(weights, biases, strict=True)])
    assert_close(out.as_subclass(torch.Tensor), loop, **EXACT)


@pytest.mark.parametrize("noise_dim", [-1, -2])
@pytest.mark.parametrize("particles", [(3, 1), (3,)], ids=str)
def test_two_layers_of_particles_equal_a_loop(particles, noise_dim):
    x = torch.randn(BATCH, 4)
    laws = [make_law((6, 4), noise_dim, scale=True), make_law((2, 6), noise_dim, scale=True)]
    first, second = (law.expand(particles).rsample() for law in laws)

    def network(x, first, second):
        return F.linear(F.relu(F.linear(x, first)), second)

    out = network(x, first, second)
    assert isinstance(out, ParticleTensor)
    assert out.shape == (3, BATCH, 2)

    def dense_weight(law, noise):
        return law.theta * dense.unit_shaped(noise, noise_dim, 2)

    rows = [w.draw.rows(BATCH) for w in (first, second)]
    loop = torch.stack(
        [
            torch.stack(
                [
                    network(x[b], *(dense_weight(law, r[p, b]) for law, r in zip(laws, rows, strict=True)))
                    for b in range(BATCH)
                ]
            )
            for p in range(3)
        ]
    )
    assert_close(out.as_subclass(torch.Tensor), loop, **EXACT)


def test_particles_through_a_convolutional_network():
    x = torch.randn(BATCH, 2, 6, 6)
    laws = [make_law((3, 2, 3, 3), 0), make_law((4, 3, 3, 3), 1), make_law((2, 4), -1)]
    weights = [law.expand((3, 1)).rsample() for law in laws]

    def network(x, w0, w1, w2):
        return F.linear(F.relu(F.conv2d(F.relu(F.conv2d(x, w0)), w1)).mean((-1, -2)), w2)

    with vsd.coherent():
        out = network(x, *weights)
    loop = torch.stack([network(x, *(w.dense()[p, 0] for w in weights)) for p in range(3)])
    assert out.shape == (3, BATCH, 2)
    assert_close(out.as_subclass(torch.Tensor), loop, **EXACT)


def test_gradients_of_particles_equal_the_loop():
    law, x = make_law((3, 4), -1), torch.randn(BATCH, 4)
    inputs = leaves(law)
    weight = law.expand((6, 1)).rsample()
    upstream = torch.randn(6, BATCH, 3)
    ours = torch.autograd.grad((F.linear(x, weight) * upstream).sum(), inputs, retain_graph=True)
    rows = weight.draw.rows(BATCH)
    loop = torch.einsum("bk,pbk,qk->pbq", x, rows, law.theta)
    assert_close(ours, torch.autograd.grad((loop * upstream).sum(), inputs), **EXACT)


def test_positions_of_one_example_share_their_noise():
    x = torch.randn(BATCH, 1, 4).expand(BATCH, 6, 4)
    out = F.linear(x, make_law((3, 4), -1).rsample())
    assert_close(out, out[:, :1].expand_as(out))
    assert (out[0] != out[1]).any()


@pytest.mark.parametrize("noise_dim", [-1, -2])
@pytest.mark.parametrize("particles", [(), (3, 1)], ids=str)
def test_example_dim_of_sequences_that_come_first(noise_dim, particles):
    law, x = make_law((3, 4), noise_dim), torch.randn(6, BATCH, 4)
    weight = law.expand(particles).rsample()
    weight.draw.source.example_dim = 1
    out = F.linear(x, weight)
    assert weight.draw.source.examples == {BATCH}
    rows = weight.draw.rows(BATCH).unsqueeze(-3)  # (..., 1, B, K)
    twin = (x * rows) @ law.theta.mT if noise_dim == -1 else (x @ law.theta.mT) * rows
    assert_close(out.as_subclass(torch.Tensor), twin, **EXACT)
    # rows of two dimensions are examples whatever example_dim says
    assert F.linear(torch.randn(7, 4), weight).shape == particles[:1] + (7, 3)
    assert weight.draw.source.examples == {BATCH, 7}


# ---- the law of a layer's output


def layer_moments(layer, x, size):
    """Mean and covariance over rows of one pass, and over dense draws one by one."""
    law = layer.law(T=3)
    per_example = layer.call(x.expand(size, *x.shape), law.rsample(), None).flatten(1)
    drawn = torch.stack([layer.call(x.unsqueeze(0), law.rsample().dense(), None)[0] for _ in range(size)]).flatten(1)
    return per_example, drawn


MOMENT_LAYERS = [
    Layer("linear", lambda x, w, b: F.linear(x, w), (4,), (3, 4), -1, None),
    Layer("linear, noise on outputs", lambda x, w, b: F.linear(x, w), (4,), (3, 4), -2, None),
    Layer("conv", lambda x, w, b: F.conv2d(x, w), (2, 2, 2), (3, 2, 2, 1), 0, None),
    Layer("conv, noise on inputs", lambda x, w, b: F.conv2d(x, w), (2, 2, 2), (3, 2, 2, 1), 1, None),
    Layer("grouped conv_transpose", lambda x, w, b: F.conv_transpose1d(x, w, groups=2), (2, 2), (2, 2, 1), 1, None),
]


@pytest.mark.parametrize("layer", MOMENT_LAYERS, ids=str)
def test_mean_and_covariance_of_outputs_match_dense_draws(layer):
    size = 4000
    x = torch.rand(layer.input_shape) + 0.5
    per_example, drawn = layer_moments(layer, x, size)
    # Five standard errors of the difference; the error of a covariance is that of Gaussian samples.
    variance = drawn.var(0)
    assert ((per_example.mean(0) - drawn.mean(0)).abs() < 5 * (2 * variance / size).sqrt()).all()
    bound = 5 * (2 * 2 * variance.unsqueeze(0) * variance.unsqueeze(1) / size).sqrt() + 1e-9
    assert ((per_example.T.cov() - drawn.T.cov()).abs() < bound).all()


def test_mean_and_covariance_of_a_linear_layer_in_closed_form():
    law, x, size = make_law((3, 4), -1), torch.randn(4), 100_000
    out = F.linear(x.expand(size, 4), law.rsample())
    Sigma = dense.covariance(law.alpha, law.vectors)
    mean, covariance = law.theta @ x, law.theta @ (x.diag() @ Sigma @ x.diag()) @ law.theta.T
    variance = covariance.diagonal()
    assert ((out.mean(0) - mean).abs() < 5 * (variance / size).sqrt()).all()
    assert ((out.T.cov() - covariance).abs() < 5 * (2 * variance.outer(variance) / size).sqrt()).all()


def test_noise_meets_a_convolution_before_the_bias():
    law, bias = make_law((3, 2, 2, 2), 0), torch.full((3,), 100.0)
    out = F.conv2d(torch.zeros(BATCH, 2, 4, 4), law.rsample(), bias)
    assert_close(out, torch.full_like(out, 100.0))


# ---- everything else

OTHER_OPERATIONS = {
    "w * 2": lambda w: w * 2,
    "w + w": lambda w: w + w,
    "w.sum": lambda w: w.sum(),
    "torch.sum": lambda w: torch.sum(w, 0),
    "w.mean()": lambda w: w.mean(),
    "w.mean(0)": lambda w: w.mean(0),
    "w.norm": lambda w: w.norm(),
    "w[0]": lambda w: w[0],
    "w.flatten": lambda w: w.flatten(),
    "w.permute": lambda w: w.permute(1, 0),
    "w.clone": lambda w: w.clone(),
    "stack": lambda w: torch.stack([w, w]),
    "einsum": lambda w: torch.einsum("qk,k->q", w, torch.ones(4)),
    "W @ X": lambda w: w @ torch.ones(4, 5),
    "w @ w.T": lambda w: w @ w.T,
    "X W Y": lambda w: torch.linalg.multi_dot([torch.ones(2, 3), w, torch.ones(4, 5)]),
    "embedding": lambda w: F.embedding(torch.tensor([0, 2]), w),
    "bilinear": lambda w: F.bilinear(torch.ones(2, 3), torch.ones(2, 4), w.unsqueeze(0)),
    "matmul with out": lambda w: torch.matmul(torch.ones(5, 3), w, out=None),
    "addmm with beta": lambda w: torch.addmm(torch.ones(4), torch.ones(5, 3), w, beta=2.0),
    "reshape": lambda w: w.reshape(4, 3),
    "view": lambda w: w.view(-1),
    "torch.reshape by keyword": lambda w: torch.reshape(input=w, shape=(12,)),
    "linear of itself": lambda w: F.linear(w, w),
    "float": lambda w: w.float(),
    "comparison": lambda w: (w > 0).double(),
    "numpy": lambda w: torch.from_numpy(w.detach().numpy()),
    "tolist": lambda w: torch.tensor(w.tolist()),
    "iteration": lambda w: torch.stack(list(w)),
}


@pytest.mark.parametrize("operation", OTHER_OPERATIONS.values(), ids=OTHER_OPERATIONS.keys())
def test_other_operations_meet_the_dense_draw(operation):
    weight = make_law((3, 4), -1).rsample()
    out = operation(weight)
    assert weight.draw.source.used_dense
    assert_close(out, operation(weight.dense()))
    assert not isinstance(out, LazyWeight)


def test_the_dense_draw_is_drawn_once_and_has_gradients():
    law = make_law((3, 4), -1)
    inputs = leaves(law)
    weight = law.rsample()
    assert weight.dense() is weight.dense()
    unit = weight.draw.unit_noise()
    assert_close(weight.dense(), law.theta * unit)
    gradients = torch.autograd.grad((weight * torch.randn(3, 4)).sum(), inputs)
    assert all((g != 0).any() for g in gradients)


def attention(x, weight):
    bias, out, out_bias = torch.ones(12), torch.eye(4), torch.ones(4)
    return F.multi_head_attention_forward(x, x, x, 4, 2, weight, bias, None, None, False, 0.0, out, out_bias)[0]


def lstm(x, weight):
    state, recurrent, bias = torch.zeros(1, 2, 3), torch.ones(12, 3), torch.ones(12)
    weights = [weight, recurrent, bias, bias]
    return torch.lstm(x, (state, state), weights, True, 1, 0.0, False, False, False)[0]


@pytest.mark.parametrize("kernel", [attention, lstm])
def test_kernels_that_take_the_dense_draw(kernel):
    x, weight = torch.randn(6, 2, 4), make_law((12, 4), -1).rsample()
    assert_close(kernel(x, weight), kernel(x, weight.dense()))
    assert weight.draw.source.used_dense


METADATA = {
    "shape": lambda w: w.shape == (3, 4),
    "size": lambda w: w.size() == (3, 4) and w.size(0) == 3,
    "dim": lambda w: w.dim() == w.ndim == 2,
    "len": lambda w: len(w) == 3,
    "numel": lambda w: w.numel() == w.nelement() == torch.numel(w) == 12,
    "dtype": lambda w: w.dtype == torch.float64 and w.is_floating_point() and torch.is_floating_point(w),
    "device": lambda w: w.device.type == "cpu" and not w.is_cuda and w.get_device() == -1,
    "layout": lambda w: w.layout == torch.strided and not w.is_sparse and not w.is_quantized and not w.is_meta,
    "complex": lambda w: not w.is_complex() and not torch.is_complex(w) and not w.is_conj() and not w.is_neg(),
    "bytes": lambda w: w.element_size() == w.itemsize == 8 and w.nbytes == 96 and w.is_signed(),
    "strides": lambda w: w.is_contiguous() and w.stride() == (4, 1),
    "gradient": lambda w: not w.requires_grad and w.is_leaf and not w.is_inference(),
    "type": lambda w: isinstance(w, torch.Tensor) and torch.is_tensor(w) and not w.is_nested,
    "identity": lambda w: w in {w} and hash(w) is not None,
    "repr": lambda w: repr(w) == "LazyWeight(shape=(3, 4), noise_dim=-1, dtype=torch.float64)",
    "views": lambda w: w.T.shape == w.mT.shape == w.t().shape == w.transpose(0, 1).shape == (4, 3),
    "mean": lambda w: w.mean.shape == (3, 4),
}


@pytest.mark.parametrize("question", METADATA.values(), ids=METADATA.keys())
def test_metadata_makes_no_draw(question):
    weight = make_law((3, 4), -1).rsample()
    state = torch.get_rng_state()
    assert question(weight)
    assert not weight.draw.source.used_dense
    assert torch.equal(torch.get_rng_state(), state)


def test_views_share_the_noise():
    law, x = make_law((3, 4), -1), torch.randn(BATCH, 4)
    weight = law.rsample()
    assert_close(F.linear(x, weight), x @ weight.T)
    assert_close(weight.T.dense(), weight.dense().T)
    assert_close(weight.T * 1, weight.dense().T)
    assert isinstance(weight.mT, LazyWeight)
    assert_close(weight.mT.mean, law.theta.T)


@pytest.mark.parametrize("to", [(3,), (1, 3), (3, 1, 1)], ids=str)
def test_another_batch_shape_shows_the_same_noise(to):
    law, x = make_law((2, 4), -1), torch.randn(BATCH, 4)
    weight = law.expand((3, 1)).rsample()
    view = weight.reshape(to + (2, 4))
    assert isinstance(view, LazyWeight)
    assert view.shape == to + (2, 4)
    out = F.linear(x, view)
    assert_close(out.as_subclass(torch.Tensor).reshape(3, BATCH, 2), F.linear(x, weight).as_subclass(torch.Tensor))
    assert_close(view.dense().reshape(3, 2, 4), weight.dense().reshape(3, 2, 4))
    assert weight.draw.source.used_dense


def test_a_reshape_to_the_same_shape_is_the_weight_itself():
    weight = make_law((2, 4), -1).expand((3,)).rsample()
    assert weight.reshape(3, 2, 4) is weight
    assert weight.view((3, 2, 4)) is weight


def test_another_pass_of_the_same_draw():
    """``again``: the same dense draw, noise per example anew."""
    weight, x = make_law((3, 4), -1).rsample(), torch.randn(BATCH, 4)
    later = LazyWeight(weight.draw.again())
    assert (F.linear(x, later) != F.linear(x, weight)).any()
    assert_close(later.dense(), weight.dense(), rtol=0, atol=0)


@pytest.mark.parametrize("scale", [False, True])
def test_the_mean_is_theta_times_z(scale):
    law = make_law((3, 4), -1, scale=scale)
    weight = law.rsample()
    assert_close(weight.mean.as_subclass(torch.Tensor), law.mean)
    assert_close(weight.mean + 0, law.theta * law.scale if scale else law.theta)


# ---- gradients


@pytest.mark.parametrize("name", ["theta", "alpha", "vectors", "scale"])
def test_requires_grad_where_a_parameter_does(name):
    law = make_law((3, 4), -1, scale=True)
    assert not law.rsample().requires_grad
    tensors = {"theta": law.theta, "alpha": law.alpha, "vectors": law.vectors, "scale": law.scale}
    tensors[name].requires_grad_()
    law = StructuredDropout(**tensors, noise_dim=-1)
    weight = law.rsample()
    assert weight.requires_grad
    assert weight.T.requires_grad
    assert F.linear(torch.randn(BATCH, 4), weight).requires_grad
    assert weight.dense().requires_grad
    assert not law.sample().requires_grad


def test_a_draw_made_without_gradients_has_none():
    law = make_law((3, 4), -1)
    leaves(law)
    with torch.no_grad():
        weight = law.rsample()
    assert not weight.requires_grad
    assert not F.linear(torch.randn(BATCH, 4), weight).requires_grad
    assert not weight.dense().requires_grad


def test_a_draw_first_used_without_gradients_keeps_its_noise_and_gets_gradients():
    law, x = make_law((3, 4), -1, scale=True), torch.randn(BATCH, 4)
    inputs = leaves(law)
    weight = law.rsample()
    with torch.no_grad():
        before, before_dense = F.linear(x, weight), weight.dense() * 1
        again = F.linear(x, weight)
    assert_close(before, again, rtol=0, atol=0)
    after, after_dense = F.linear(x, weight), weight * 1
    assert_close(after, before, rtol=0, atol=0)
    assert_close(after_dense, before_dense, rtol=0, atol=0)
    for out in (after, after_dense):
        assert all((g != 0).any() for g in torch.autograd.grad(out.square().sum(), inputs, retain_graph=True))
    with torch.no_grad():
        assert_close(F.linear(x, weight), before, rtol=0, atol=0)
        assert_close(weight * 1, before_dense, rtol=0, atol=0)


def test_a_view_first_used_without_gradients_keeps_its_noise():
    law, x = make_law((3, 4), -1), torch.randn(BATCH, 4)
    law.theta.requires_grad_()  # theta alone: the noise never has a gradient
    weight = law.rsample()
    with torch.no_grad():
        before, before_dense = F.linear(x, weight), weight.dense() * 1
    assert_close(F.linear(x, weight), before, rtol=0, atol=0)
    assert_close(F.linear(x, weight), before, rtol=0, atol=0)
    assert_close(weight.dense(), before_dense, rtol=0, atol=0)
    assert weight.dense().requires_grad


# ---- copies


def through_torch_save(weight):
    buffer = io.BytesIO()
    torch.save(weight, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w)), through_torch_save]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_copy_is_the_dense_draw(duplicate, transposed):
    law = make_law((3, 4), -1)
    leaves(law)
    weight = law.rsample().T if transposed else law.rsample()
    copied = duplicate(weight)
    assert type(copied) is torch.Tensor
    assert not copied.requires_grad
    assert_close(copied, weight.dense().detach())


def test_deepcopy_keeps_ties():
    weight = make_law((3, 4), -1).rsample()
    first, second = copy.deepcopy([weight, weight])
    assert first is second


# ---- dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("noise_dim", [-1, -2])
def test_dtypes(dtype, noise_dim):
    law = make_law((3, 4), noise_dim)
    law = StructuredDropout(law.theta.to(dtype), law.alpha.to(dtype), law.vectors.to(dtype), noise_dim)
    weight, x, bias = law.rsample(), torch.randn(BATCH, 4, dtype=dtype), torch.randn(3, dtype=dtype)
    out = F.linear(x, weight, bias)
    assert out.dtype == weight.dtype == weight.dense().dtype == dtype
    noise = weight.draw.rows(BATCH).double()
    double = x.double(), law.theta.double()
    twin = (double[0] * noise) @ double[1].mT if noise_dim == -1 else (double[0] @ double[1].mT) * noise
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    assert_close(out.double(), twin + bias.double(), rtol=tolerance, atol=tolerance)


def test_the_dense_draw_has_the_dtype_of_theta():
    law = make_law((3, 4), -1)
    law = StructuredDropout(law.theta.to(torch.bfloat16), law.alpha.float(), law.vectors.float(), -1)
    weight = law.rsample()
    assert weight.dense().dtype == weight.dtype == torch.bfloat16
    assert F.linear(torch.randn(BATCH, 4, dtype=torch.bfloat16), weight).dtype == torch.bfloat16


AUTOCAST_LAYERS = [layer for layer in WITH_BIAS if "sequences" not in layer.name and "grids" not in layer.name]


@pytest.mark.parametrize("layer", AUTOCAST_LAYERS, ids=str)
def test_autocast_gives_the_dtype_that_a_plain_weight_gives(layer):
    law = layer.law()
    law = StructuredDropout(law.theta.float(), law.alpha.float(), law.vectors.float(), layer.noise_dim)
    inputs = leaves(law)
    x, bias = torch.randn(BATCH, *layer.input_shape).float(), layer.bias().float()
    weight = law.rsample()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, plain = layer.call(x, weight, bias), layer.call(x, law.theta, bias)
    assert out.dtype == plain.dtype
    full = layer.call(x, weight, bias)
    assert_close(out.float(), full, rtol=0.1, atol=0.2)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.float().square().sum(), inputs))


# ---- replicas: a batch of weights of its own


@pytest.mark.parametrize("noise_dim", [-1, -2])
@pytest.mark.parametrize("batch", [(4,), (2, 3)], ids=str)
@pytest.mark.parametrize("positions", [(), (6,)], ids=str)
@pytest.mark.parametrize("marked", [False, True])
def test_replicas_through_linear(noise_dim, batch, positions, marked):
    """Unmarked, an input meets all replicas; marked, each replica has its own."""
    law = make_law((3, 4), noise_dim, batch)
    # as many examples as replicas: nothing may take one for the other
    x = torch.randn(batch + (4,) + positions + (4,) if marked else (4,) + positions + (4,))
    bias = torch.randn(3)
    weight = law.rsample()
    out = F.linear(x.as_subclass(ParticleTensor) if marked else x, weight, bias)
    rows = weight.draw.rows(4)
    assert rows.shape == batch + (4, 4 if noise_dim == -1 else 3)
    rows = rows.reshape(batch + (4,) + (1,) * len(positions) + rows.shape[-1:])
    theta = law.theta.mT.reshape(batch + (1,) * len(positions) + (4, 3))
    twin = (x * rows) @ theta if noise_dim == -1 else (x @ theta) * rows
    assert_close(out.as_subclass(torch.Tensor), twin + bias, **EXACT)


@pytest.mark.parametrize("noise_dim", [-1, -2])
@pytest.mark.parametrize("shape", [(4,), (7, 4), (5, 7, 4), (1, 7, 4)], ids=str)
def test_replicas_through_matmul_have_torchs_shapes(noise_dim, shape):
    law, x = make_law((4, 3), noise_dim, (5,)), torch.randn(shape)
    weight = law.rsample()
    with vsd.coherent():
        out = x @ weight
    assert_close(out.as_subclass(torch.Tensor), x @ weight.dense(), **EXACT)
    assert (x @ weight).shape == out.shape


def test_replicas_with_more_batch_dimensions_than_weights_take_the_dense_draw():
    weight, x = make_law((4, 3), -2, (5,)).rsample(), torch.randn(2, 5, 7, 4)
    assert_close(x @ weight, x @ weight.dense())


@pytest.mark.parametrize("noise_dim", [-1, -2])
def test_particles_of_replicas(noise_dim):
    law, x = make_law((3, 4), noise_dim, (4,)), torch.randn(7, 4)
    weight = law.rsample((2,))
    with vsd.coherent():
        out = F.linear(x, weight)
    assert_close(out.as_subclass(torch.Tensor), x @ weight.dense().mT, **EXACT)


def test_replicas_of_the_noise_alone():
    law = StructuredDropout(torch.randn(3, 4), torch.rand(5, 4) + 0.1, torch.randn(5, 2, 4), -1, event_dim=2)
    x, weight = torch.randn(7, 4), law.rsample()
    out = F.linear(x, weight)
    assert_close(out.as_subclass(torch.Tensor), (x * weight.draw.rows(7)) @ law.theta.mT, **EXACT)


def test_replicas_through_two_layers():
    first, second = make_law((6, 4), -1, (5,)).rsample(), make_law((3, 6), -2, (5,)).rsample()
    x = torch.randn(7, 4)
    with vsd.coherent():
        out = F.linear(torch.relu(F.linear(x, first)), second)
    twin = torch.relu(x @ first.dense().mT) @ second.dense().mT
    assert_close(out.as_subclass(torch.Tensor), twin, **EXACT)


# ---- z


def test_z_is_shared_by_all_examples():
    law, x = make_law((3, 4), -1, scale=True), torch.randn(BATCH, 4)
    without = StructuredDropout(law.theta, law.alpha, law.vectors, -1)
    torch.manual_seed(1)
    out = F.linear(x, law.rsample())
    torch.manual_seed(1)
    assert_close(out, F.linear(x * law.scale, without.rsample()), **EXACT)


@pytest.mark.parametrize("batch", [(3, 1), (3,)], ids=str)
def test_each_particle_has_its_own_z(batch):
    law = make_law((3, 4), -1)
    z = torch.rand(*batch, 4) + 0.5
    law = StructuredDropout(law.theta, law.alpha, law.vectors, -1, scale=z)
    x, weight = torch.randn(BATCH, 4), law.rsample()
    with vsd.coherent():
        out = F.linear(x, weight)
    loop = torch.stack([F.linear(x, w) for w in weight.dense().reshape(3, 3, 4)])
    assert_close(out.as_subclass(torch.Tensor), loop, **EXACT)
    assert F.linear(x, weight).shape == (3, BATCH, 3)


# ---- a generator of its own


def draw_in_batches(law, x, sizes, seed, scale_law=None):
    generator = torch.Generator().manual_seed(seed)
    outs = []
    for chunk in x.split(sizes):
        weight = law.rsample()
        weight.draw.source.rows, weight.draw.source.scale_posterior = generator, scale_law
        outs.append(F.linear(chunk, weight))
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("K", [1, 4, 16, 37])
@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("sizes", [[1] * 12, [5, 7], [3, 3, 3, 3], [11, 1]], ids=str)
def test_rows_do_not_depend_on_how_they_are_cut_into_batches(K, sizes, hierarchical, dtype):
    law = make_law((3, K), -1)
    law = StructuredDropout(law.theta.to(dtype), law.alpha.to(dtype), law.vectors.to(dtype), -1)
    one = torch.ones(K, dtype=dtype)
    z = torch.distributions.LogNormal(0 * one, one) if hierarchical else None
    x = torch.ones(12, K, dtype=dtype)
    whole = draw_in_batches(law, x, [12], 3, z)
    # products of a different batch size may round differently
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.2}[dtype]
    assert_close(draw_in_batches(law, x, sizes, 3, z), whole, rtol=tolerance, atol=tolerance)
    assert (draw_in_batches(law, x, [12], 4, z) != whole).any()


def test_a_generator_leaves_the_global_one_alone():
    law, x = make_law((3, 4), -1), torch.randn(BATCH, 4)
    weight = law.rsample()
    weight.draw.source.rows = weight.draw.source.dense = torch.Generator().manual_seed(0)
    state = torch.get_rng_state()
    F.linear(x, weight)
    weight.dense()
    assert torch.equal(torch.get_rng_state(), state)


def test_each_example_draws_its_own_z_where_asked_to():
    law = make_law((3, 4), -1)
    weight = law.rsample()
    weight.draw.source.scale_posterior = torch.distributions.LogNormal(torch.zeros(4), torch.full((4,), 0.5))
    rows = weight.draw.rows(100_000)
    # E[z ξ] = E[z] = exp(δ / 2)
    assert_close(rows.mean(0), torch.full((4,), 0.125).exp(), rtol=0.02, atol=0.02)
    second = (1 + law.noise.variance) * torch.tensor(0.5).exp()
    assert_close(rows.square().mean(0), second, rtol=0.05, atol=0.05)


# ---- coherent


def test_coherent_is_one_function_and_ends():
    weight, x = make_law((3, 4), -1).rsample(), torch.ones(BATCH, 4)
    with vsd.coherent():
        inside = F.linear(x, weight)
        assert_close(F.linear(x[:2], weight), inside[:2])
    assert_close(inside, inside[:1].expand_as(inside))
    outside = F.linear(x, weight)
    assert (outside[0] != outside[1]).any()


def test_coherent_ends_after_an_error():
    def failing():
        with vsd.coherent():
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    out = F.linear(torch.ones(BATCH, 4), make_law((3, 4), -1).rsample())
    assert (out[0] != out[1]).any()


# ---- errors


def test_an_input_of_other_features():
    weight = make_law((3, 4), -1).rsample()
    weight.draw.source.name = "net.0.weight"
    with pytest.raises(ValueError, match=r"\bnet\.0\.weight\b"):
        F.linear(torch.randn(5, 7), weight)


def test_a_single_row_without_a_batch():
    with pytest.raises(ValueError, match=r"x\[None\]"):
        F.linear(torch.randn(1), make_law((3, 4), -1).rsample())


def test_an_input_of_a_different_dtype():
    with pytest.raises(ValueError, match=r"x\.to\(torch\.float64\)"):
        F.linear(torch.randn(5, 4, dtype=torch.float32), make_law((3, 4), -1).rsample())


def test_an_input_without_a_dimension():
    with pytest.raises(ValueError, match=r"\bweight\b"):
        torch.tensor(1.0) @ make_law((4, 3), 0).rsample()


@pytest.mark.parametrize("axis", [0, 1], ids=["noise on outputs", "noise on inputs"])
def test_a_convolution_with_an_input_of_other_channels(axis):
    weight = make_law((3, 2, 2, 2), axis).rsample()
    with pytest.raises(ValueError, match=r"\bweight\b"):
        F.conv2d(torch.randn(5, 4, 6, 6), weight)


def test_a_convolution_with_an_input_of_another_rank():
    weight = make_law((3, 2, 2, 2), 0).rsample()
    with pytest.raises(ValueError, match=r"\bweight\b"):
        F.conv2d(torch.randn(2, 6), weight)


def test_a_convolution_with_a_batch_of_weights():
    weight = make_law((3, 2, 2, 2), 0, (5,)).rsample()
    with pytest.raises(ValueError, match=r"\bweight\b"):
        F.conv2d(torch.randn(4, 2, 6, 6), weight)


def test_particles_with_noise_on_the_positions_of_a_kernel():
    weight = make_law((3, 2, 2, 2), -1).expand((5,)).rsample()
    with pytest.raises(ValueError, match=r"\bnoise_dim\b"):
        F.conv2d(torch.randn(4, 2, 6, 6), weight)


def test_noise_on_the_positions_of_a_kernel_takes_the_dense_draw():
    weight, x = make_law((3, 2, 2, 2), -1).rsample(), torch.randn(4, 2, 6, 6)
    assert_close(F.conv2d(x, weight), F.conv2d(x, weight.dense()))


def test_a_weight_below_torchs_function_protocol():
    weight = make_law((3, 4), -1).rsample()
    with pytest.raises(RuntimeError, match=r"\bdense\b"), torch._C.DisableTorchFunctionSubclass():
        weight * 2


# ---- the table of layers


@pytest.mark.parametrize("row", range(len(LAYER_TABLE)))
def test_a_row_of_the_table_has_a_handler_and_puts_noise_on_its_own_axis(row):
    """A row without a handler would give a hand-written model an axis that its product then does not use."""
    layer = LAYER_TABLE[row]
    assert {function for function in layer.functions if function not in lazy_weight._HANDLERS} == set()
    assert {layer.noise_dim(3, "out"), layer.noise_dim(3, "in")} <= {-3, -2}
    if layer.module is not None:
        assert layer_of(layer.module.__new__(layer.module)) is layer
