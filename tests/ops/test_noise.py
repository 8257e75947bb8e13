"""The noise kernels and their hand-written gradients against composed twins."""

import pytest
import torch
from torch.testing import assert_close

from pyro_vsd.ops.householder import compact_wy, rotate
from pyro_vsd.ops.noise import joint_noise_terms, noise_terms, structured_noise
from tests import dense

EXACT = {"rtol": 1e-9, "atol": 1e-9}
SIZES = pytest.mark.parametrize(("T", "K"), [(0, 4), (1, 1), (1, 4), (3, 5), (5, 5)])
# Batch shapes of eps (before its rows), std, N and S.
BROADCASTS = [
    pytest.param((), (), (), id="one law"),
    pytest.param((3,), (), (), id="particles"),
    pytest.param((2, 3), (), (), id="particles of two dimensions"),
    pytest.param((3,), (3,), (3,), id="batch"),
    pytest.param((2, 3), (2, 3), (2, 3), id="batch of two dimensions"),
    pytest.param((), (3,), (), id="std has a batch"),
    pytest.param((), (), (3,), id="vectors have a batch"),
    pytest.param((2, 3), (3,), (2, 1), id="all broadcast"),
]


def terms_twin(log_alpha, vectors):
    alpha = log_alpha.exp()
    wy = compact_wy(vectors)
    std = alpha.sqrt()
    return std, wy.N, -(wy.S @ wy.N) * std.unsqueeze(-2), 2 * dense.empirical_bayes_kl(alpha, vectors, 1.0)


@SIZES
@pytest.mark.parametrize("batch", [(), (4,), (2, 3)], ids=str)
def test_noise_terms_equal_the_twin(batch, T, K):
    log_alpha, vectors = torch.randn(batch + (K,)), torch.randn(batch + (T, K))
    assert_close(tuple(noise_terms(log_alpha, vectors)), terms_twin(log_alpha, vectors), **EXACT)


@SIZES
def test_noise_terms_have_the_gradients_of_the_twin(T, K):
    log_alpha, vectors = torch.randn(2, K, requires_grad=True), torch.randn(2, T, K, requires_grad=True)
    ours, twin = noise_terms(log_alpha, vectors), terms_twin(log_alpha, vectors)
    weights = [torch.randn_like(v) for v in ours]
    gradients = [
        torch.autograd.grad(sum((v * w).sum() for v, w in zip(values, weights, strict=True)), (log_alpha, vectors))
        for values in (ours, twin)
    ]
    assert_close(gradients[0], gradients[1], **EXACT)


@pytest.mark.parametrize(("T", "K"), [(0, 3), (1, 3), (3, 4), (4, 4)])
def test_gradcheck_of_noise_terms(T, K):
    inputs = torch.randn(2, K, requires_grad=True), torch.randn(2, T, K, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, v: tuple(noise_terms(a, v)), inputs)


@pytest.mark.parametrize("T", [0, 2])
@pytest.mark.parametrize(("alpha_batch", "vector_batch"), [((3,), ()), ((), (3,)), ((2, 1), (3,))], ids=str)
def test_noise_terms_broadcast(alpha_batch, vector_batch, T):
    log_alpha = torch.randn(alpha_batch + (4,), requires_grad=True)
    vectors = torch.randn(vector_batch + (T, 4), requires_grad=True)
    ratio, twin = noise_terms(log_alpha, vectors).log_ratio, terms_twin(log_alpha, vectors)[3]
    assert_close(ratio, twin, **EXACT)
    weight = torch.randn_like(ratio)
    inputs = (log_alpha, vectors) if T else (log_alpha,)
    assert_close(
        torch.autograd.grad((ratio * weight).sum(), inputs), torch.autograd.grad((twin * weight).sum(), inputs), **EXACT
    )


def test_only_the_outputs_used_need_a_gradient():
    log_alpha, vectors = torch.randn(4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(noise_terms(log_alpha, vectors).std.sum(), log_alpha)
    assert_close(gradient, 0.5 * (0.5 * log_alpha.detach()).exp())


@pytest.mark.parametrize("T", [0, 3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str
)
def test_noise_terms_in_any_dtype(dtype, tolerance, T):
    log_alpha, vectors = torch.randn(6, dtype=dtype), torch.randn(T, 6, dtype=dtype)
    terms = noise_terms(log_alpha, vectors)
    assert (terms.std.dtype, terms.N.dtype, terms.W.dtype) == (dtype,) * 3
    assert terms.log_ratio.dtype == torch.promote_types(dtype, torch.float32)
    twin = terms_twin(log_alpha.double(), vectors.double())
    for value, expected in zip(terms, twin, strict=True):
        assert_close(value.double(), expected, rtol=tolerance, atol=tolerance)


def test_the_sum_of_bfloat16_parameters_is_as_exact_as_float32_holds():
    log_alpha, vectors = torch.randn(1000, dtype=torch.bfloat16), torch.randn(3, 1000, dtype=torch.bfloat16)
    twin = terms_twin(log_alpha.double(), vectors.double())[3]
    assert_close(noise_terms(log_alpha, vectors).log_ratio.double(), twin, rtol=1e-6, atol=0)


@pytest.mark.parametrize("log_alpha", [-27.6, 27.6])  # alpha of 1e-12 and 1e12
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_alpha(log_alpha, dtype):
    log_alpha = torch.full((5,), log_alpha, dtype=dtype, requires_grad=True)
    vectors = torch.randn(2, 5, dtype=dtype, requires_grad=True)
    ratio = noise_terms(log_alpha, vectors).log_ratio
    # equal alphas: U has no effect, and log((1 + α) / α) = log(1 + 1/α)
    assert_close(ratio, (-log_alpha).exp().log1p().sum(), rtol=1e-4, atol=1e-4)
    ratio.backward()
    assert_close(log_alpha.grad, -1 / (1 + log_alpha.detach().exp()), rtol=1e-3, atol=1e-3)
    assert vectors.grad.abs().max() < 1e-3


def test_extreme_alpha_side_by_side_stay_finite():
    log_alpha = torch.tensor([-27.6, 0.0, 27.6, 3.0], dtype=torch.float32, requires_grad=True)
    vectors = torch.randn(3, 4, dtype=torch.float32, requires_grad=True)
    terms = noise_terms(log_alpha, vectors)
    twin = terms_twin(log_alpha.double(), vectors.double())[3]
    assert_close(terms.log_ratio.double(), twin, rtol=1e-4, atol=1e-4)
    terms.log_ratio.backward()
    assert torch.isfinite(log_alpha.grad).all()
    assert torch.isfinite(vectors.grad).all()


@pytest.mark.parametrize("norm", [0.0, 1e-20, 1e20])
def test_extreme_norms_have_finite_gradients(norm):
    vectors = torch.randn(3, 5, dtype=torch.float32)
    vectors[1] *= norm
    vectors.requires_grad_()
    log_alpha = torch.randn(5, dtype=torch.float32, requires_grad=True)
    sum(v.sum() for v in noise_terms(log_alpha, vectors)).backward()
    assert torch.isfinite(vectors.grad).all()
    assert torch.isfinite(log_alpha.grad).all()
    assert bool((vectors.grad[1] == 0).all()) == (norm == 0)


def test_parallel_vectors_cancel():
    v, log_alpha = torch.randn(1, 6), torch.randn(6)
    twice = noise_terms(log_alpha, torch.cat([v, 2 * v])).log_ratio
    assert_close(twice, noise_terms(log_alpha, torch.zeros(0, 6)).log_ratio, **EXACT)


@SIZES
@pytest.mark.parametrize(("eps_batch", "std_batch", "vector_batch"), BROADCASTS)
def test_structured_noise_equals_the_twin(eps_batch, std_batch, vector_batch, T, K):
    eps, alpha = torch.randn(eps_batch + (7, K)), torch.rand(std_batch + (K,)) + 0.1
    vectors = torch.randn(vector_batch + (T, K))
    assert_close(
        structured_noise(eps, alpha.sqrt(), *compact_wy(vectors)), dense.structured_noise(eps, alpha, vectors), **EXACT
    )


@pytest.mark.parametrize("T", [0, 1, 3])
@pytest.mark.parametrize(("eps_batch", "std_batch", "vector_batch"), BROADCASTS)
def test_structured_noise_has_the_gradients_of_the_twin(eps_batch, std_batch, vector_batch, T):
    eps = torch.randn(eps_batch + (7, 4), requires_grad=True)
    alpha = (torch.rand(std_batch + (4,)) + 0.1).requires_grad_()
    vectors = torch.randn(vector_batch + (T, 4), requires_grad=True)
    ours = structured_noise(eps, alpha.sqrt(), *compact_wy(vectors))
    twin = dense.structured_noise(eps, alpha, vectors)
    weight, inputs = torch.randn_like(ours), (eps, alpha, *([vectors] if T else []))
    assert_close(
        torch.autograd.grad((ours * weight).sum(), inputs), torch.autograd.grad((twin * weight).sum(), inputs), **EXACT
    )


@pytest.mark.parametrize(("eps_batch", "std_batch", "vector_batch"), BROADCASTS)
@pytest.mark.parametrize("T", [0, 2])
def test_gradcheck_of_structured_noise(eps_batch, std_batch, vector_batch, T):
    shapes = eps_batch + (2, 3), std_batch + (3,), vector_batch + (T, 3), vector_batch + (T, T)
    inputs = tuple(torch.randn(shape, requires_grad=True) for shape in shapes)
    assert torch.autograd.gradcheck(structured_noise, inputs)


def test_structured_noise_is_one_plus_the_rotated_draw():
    eps, std, wy = torch.randn(6, 5), torch.rand(5), compact_wy(torch.randn(2, 5))
    assert_close(structured_noise(eps, std, *wy), 1 + rotate(wy, eps * std))


@pytest.mark.parametrize("T", [0, 2])
def test_structured_noise_leaves_its_arguments_alone(T):
    arguments = torch.randn(6, 5), torch.rand(5), *compact_wy(torch.randn(T, 5))
    before = [a.clone() for a in arguments]
    structured_noise(*arguments)
    assert_close(list(arguments), before, rtol=0, atol=0)


@pytest.mark.parametrize("T", [0, 2])
def test_structured_noise_takes_strided_rows(T):
    """``predict`` draws whole blocks and cuts them."""
    eps, std, wy = torch.randn(2, 6, 16)[..., :5], torch.rand(5), compact_wy(torch.randn(T, 5))
    assert_close(structured_noise(eps, std, *wy), structured_noise(eps.contiguous(), std, *wy))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_structured_noise_keeps_the_dtype(dtype):
    eps, std, vectors = torch.randn(6, 5, dtype=dtype), torch.rand(5, dtype=dtype), torch.randn(2, 5, dtype=dtype)
    xi = structured_noise(eps, std, *compact_wy(vectors))
    twin = dense.structured_noise(eps.double(), std.double().square(), vectors.double())
    assert xi.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    assert_close(xi.double(), twin, rtol=tolerance, atol=tolerance)


def test_autocast_leaves_the_rotation_in_full_precision():
    eps, std = torch.randn(6, 5, dtype=torch.float32), torch.rand(5, dtype=torch.float32).requires_grad_()
    N, S = compact_wy(torch.randn(2, 5, dtype=torch.float32))
    N.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = structured_noise(eps, std, N, S)
    outside = structured_noise(eps, std, N, S)
    assert inside.dtype == torch.float32
    assert_close(inside, outside, rtol=0, atol=0)
    assert_close(torch.autograd.grad(inside.sum(), (std, N)), torch.autograd.grad(outside.sum(), (std, N)))


def test_a_million_units_need_no_square_matrix():
    log_alpha = torch.randn(1_000_000, dtype=torch.float32, requires_grad=True)
    vectors = torch.randn(3, 1_000_000, dtype=torch.float32, requires_grad=True)
    noise_terms(log_alpha, vectors).log_ratio.backward()
    assert torch.isfinite(vectors.grad).all()


# Widths of the sites; a zero vector among them below.
SITES = pytest.mark.parametrize("widths", [[4], [3, 5, 1], [6, 6]], ids=str)


def site_parameters(widths, T, dtype=torch.float64):
    log_alphas = [torch.randn(K, dtype=dtype).requires_grad_() for K in widths]
    vectors = [torch.randn(T, K, dtype=dtype) for K in widths]
    if T:
        vectors[0][0] = 0
    return log_alphas, [v.requires_grad_() for v in vectors]


@SITES
@pytest.mark.parametrize("T", [0, 1, 3])
def test_joint_terms_are_those_of_each_site(widths, T):
    log_alphas, vectors = site_parameters(widths, T)
    joint = joint_noise_terms(log_alphas, vectors)
    single = [noise_terms(*pair) for pair in zip(log_alphas, vectors, strict=True)]
    assert_close([tuple(t) for t in joint], [tuple(t) for t in single], **EXACT)
    inputs = log_alphas + (vectors if T else [])

    def total(terms, weights):
        return sum((v * w).sum() for term in terms for v, w in zip(term, next(weights), strict=True))

    weights = [[torch.randn_like(v) for v in term] for term in single]
    ours = torch.autograd.grad(total(joint, iter(weights)), inputs)
    assert_close(ours, torch.autograd.grad(total(single, iter(weights)), inputs), **EXACT)


@SITES
def test_gradcheck_of_joint_terms(widths):
    log_alphas, vectors = site_parameters(widths, 2)
    # a zero vector has no derivative
    vectors[0] = torch.randn(2, widths[0], requires_grad=True)

    def function(*tensors):
        terms = joint_noise_terms(tensors[: len(widths)], tensors[len(widths) :])
        return tuple(value for term in terms for value in term)

    assert torch.autograd.gradcheck(function, (*log_alphas, *vectors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joint_terms_keep_the_dtype(dtype):
    log_alphas, vectors = site_parameters([3, 5], 2, dtype)
    joint = joint_noise_terms(log_alphas, vectors)
    single = [noise_terms(*pair) for pair in zip(log_alphas, vectors, strict=True)]
    assert_close([tuple(t) for t in joint], [tuple(t) for t in single])
    sum(v.float().sum() for term in joint for v in term).backward()
    assert {p.grad.dtype for p in log_alphas + vectors} == {dtype}


def test_joint_terms_that_are_not_used_cost_no_gradient():
    log_alphas, vectors = site_parameters([3, 5], 2)
    joint_noise_terms(log_alphas, vectors)[1].log_ratio.backward()
    assert (log_alphas[0].grad == 0).all()
    twin = noise_terms(log_alphas[1], vectors[1]).log_ratio
    assert_close(log_alphas[1].grad, torch.autograd.grad(twin, log_alphas[1])[0], **EXACT)
