"""The compact WY form against dense products of reflections."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from pyro_vsd.ops.householder import (
    CompactWY,
    compact_wy,
    covariance_diag,
    rotate,
    rotate_inverse,
    unit_vectors,
)
from pyro_vsd.ops.householder import dense as dense_matrix
from tests import dense

SIZES = [(0, 4), (1, 1), (1, 4), (3, 5), (5, 5), (7, 4)]
BATCHES = [(), (4,), (2, 3)]
EXACT = {"rtol": 1e-10, "atol": 1e-10}

sizes = pytest.mark.parametrize(("T", "K"), SIZES)
batches = pytest.mark.parametrize("batch", BATCHES, ids=str)


@sizes
def test_rotate_equals_dense(T, K):
    vectors, x = torch.randn(T, K), torch.randn(7, K)
    assert_close(rotate(compact_wy(vectors), x), x @ dense.reflections(vectors).mT)


@sizes
@batches
def test_dense_matrix_equals_the_product_of_reflections(batch, T, K):
    vectors = torch.randn(batch + (T, K))
    assert_close(dense_matrix(compact_wy(vectors)), dense.reflections(vectors), **EXACT)


@sizes
@batches
def test_inverse_undoes_the_rotation(batch, T, K):
    wy, x = compact_wy(torch.randn(batch + (T, K))), torch.randn(batch + (7, K))
    assert_close(rotate_inverse(wy, rotate(wy, x)), x, **EXACT)


@sizes
@batches
def test_batches_of_rows_and_single_rows(batch, T, K):
    vectors = torch.randn(batch + (T, K))
    wy, U = compact_wy(vectors), dense.reflections(vectors)
    rows, single = torch.randn(batch + (7, K)), torch.randn(batch + (K,))
    assert_close(rotate(wy, rows), rows @ U.mT, **EXACT)
    assert_close(rotate(wy, single), (U @ single.unsqueeze(-1)).squeeze(-1), **EXACT)
    assert_close(rotate_inverse(wy, single), (U.mT @ single.unsqueeze(-1)).squeeze(-1), **EXACT)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (0,)], ids=str)
def test_one_rotation_meets_any_number_of_leading_dimensions(lead):
    vectors, x = torch.randn(3, 5), torch.randn(lead + (5,))
    assert_close(rotate(compact_wy(vectors), x), x @ dense.reflections(vectors).mT, **EXACT)


def test_many_rotations_meet_the_same_rows():
    vectors, x = torch.randn(4, 3, 5), torch.randn(7, 5)
    assert_close(rotate(compact_wy(vectors), x), x @ dense.reflections(vectors).mT, **EXACT)


@sizes
@batches
def test_covariance_diag_equals_dense(batch, T, K):
    vectors, alpha = torch.randn(batch + (T, K)), torch.rand(batch + (K,)) + 0.1
    s = covariance_diag(compact_wy(vectors), alpha)
    assert_close(s, dense.covariance(alpha, vectors).diagonal(dim1=-1, dim2=-2), **EXACT)


@pytest.mark.parametrize(("T", "K"), [(1, 3), (3, 4), (4, 4)])
def test_gradients_equal_dense(T, K):
    x, weight = torch.randn(6, K), torch.randn(6, K)
    alpha = (torch.rand(K) + 0.1).requires_grad_()
    vectors = torch.randn(T, K, requires_grad=True)
    wy, U = compact_wy(vectors), dense.reflections(vectors)
    ours = (rotate(wy, x) * weight).sum() + covariance_diag(wy, alpha).log1p().sum()
    twin = (x @ U.mT * weight).sum() + dense.covariance(alpha, vectors).diagonal().log1p().sum()
    gradients = torch.autograd.grad(ours, (alpha, vectors))
    assert_close(gradients, torch.autograd.grad(twin, (alpha, vectors)), **EXACT)


@pytest.mark.parametrize(("T", "K"), [(0, 3), (1, 3), (3, 4)])
def test_gradcheck(T, K):
    def function(vectors, alpha, x):
        wy = compact_wy(vectors)
        return rotate(wy, x), rotate_inverse(wy, x), covariance_diag(wy, alpha), dense_matrix(wy)

    inputs = (torch.randn(2, T, K), torch.rand(2, K) + 0.1, torch.randn(2, 5, K))
    assert torch.autograd.gradcheck(function, tuple(v.requires_grad_() for v in inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [1e-20, 1e20])
def test_extreme_norms(dtype, norm):
    direction = torch.randn(3, 5)
    vectors = (direction * norm).to(dtype).requires_grad_()
    wy = compact_wy(vectors)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else EXACT
    assert_close(dense_matrix(wy), dense.reflections(direction).to(dtype), **tolerance)
    dense_matrix(wy).square().mul(torch.arange(5.0, dtype=dtype)).sum().backward()
    assert torch.isfinite(vectors.grad).all()
    # U does not depend on a vector's length: the gradient goes as 1 / length
    twin = direction.clone().requires_grad_()
    dense.reflections(twin).square().mul(torch.arange(5.0)).sum().backward()
    assert_close(vectors.grad.double() * norm, twin.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("norm", [1e-300, 1e300])
def test_norms_whose_square_no_float64_holds(norm):
    direction = torch.randn(2, 4)
    assert_close(dense_matrix(compact_wy(direction * norm)), dense.reflections(direction), **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_zero_vector_is_no_reflection_with_zero_gradient(dtype):
    vectors = torch.randn(3, 5, dtype=dtype)
    vectors[1] = 0
    vectors.requires_grad_()
    alpha = torch.rand(5, dtype=dtype) + 0.1
    wy = compact_wy(vectors)
    assert_close(dense_matrix(wy), dense_matrix(compact_wy(vectors[[0, 2]])), rtol=1e-2, atol=1e-2)
    (rotate(wy, torch.randn(6, 5, dtype=dtype)).sum() + covariance_diag(wy, alpha).sum()).backward()
    assert torch.isfinite(vectors.grad).all()
    assert (vectors.grad[1] == 0).all()
    assert (vectors.grad[0] != 0).any()


def test_all_vectors_zero_is_the_identity():
    assert_close(dense_matrix(compact_wy(torch.zeros(3, 4))), torch.eye(4))


def test_parallel_vectors_cancel_without_a_negative_variance():
    v = torch.randn(1, 50, dtype=torch.float32)
    alpha = torch.linspace(-12, 12, 50, dtype=torch.float32).exp()
    s = covariance_diag(compact_wy(torch.cat([v, -3 * v])), alpha)
    assert (s >= 0).all()
    # float32 unit vectors: an error of eps times the largest alpha, as MATHS says
    assert_close(s, alpha, rtol=1e-5, atol=4e-7 * float(alpha.max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtype_comes_back(dtype):
    vectors, alpha, x = torch.randn(2, 5, dtype=dtype), torch.rand(5, dtype=dtype), torch.randn(3, 5, dtype=dtype)
    wy = compact_wy(vectors)
    results = (*wy, rotate(wy, x), rotate_inverse(wy, x), covariance_diag(wy, alpha), dense_matrix(wy))
    assert {r.dtype for r in results} == {dtype}
    tolerance = {torch.bfloat16: 0.05, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    twin = x.double() @ dense.reflections(vectors.double()).mT
    assert_close(rotate(wy, x).double(), twin, rtol=tolerance, atol=tolerance)


def test_unit_vectors_give_rows_of_norm_one_and_their_norms():
    unit, norm = unit_vectors(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    assert_close(unit, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    assert_close(norm, torch.tensor([[5.0], [torch.inf]]))


def test_compact_wy_is_a_named_tuple_with_a_lower_triangular_factor():
    wy = compact_wy(torch.randn(3, 5))
    assert isinstance(wy, CompactWY)
    assert (torch.triu(wy.S, 1) == 0).all()


def test_no_square_matrix_is_formed():
    """A million units: ``K × K`` would need terabytes."""
    vectors, x = torch.randn(3, 1_000_000, dtype=torch.float32), torch.randn(1_000_000, dtype=torch.float32)
    wy = compact_wy(vectors)
    assert_close(rotate(wy, x).norm(), x.norm(), rtol=1e-4, atol=0)
    assert covariance_diag(wy, x.square()).shape == (1_000_000,)


entries = st.floats(-1e3, 1e3, allow_nan=False, allow_subnormal=False)


@st.composite
def vector_sets(draw):
    T, K = draw(st.integers(0, 6)), draw(st.integers(1, 6))
    rows = draw(st.lists(st.lists(entries, min_size=K, max_size=K), min_size=T, max_size=T))
    return torch.tensor(rows).reshape(T, K)


@given(vector_sets())
def test_u_is_orthogonal(vectors):
    U = dense_matrix(compact_wy(vectors))
    assert_close(U @ U.mT, torch.eye(vectors.shape[-1]), rtol=0, atol=1e-12)


@given(vector_sets(), st.data())
def test_the_trace_of_the_covariance_does_not_depend_on_the_rotation(vectors, data):
    K = vectors.shape[-1]
    alpha = torch.tensor(data.draw(st.lists(st.floats(1e-12, 1e12), min_size=K, max_size=K)))
    s = covariance_diag(compact_wy(vectors), alpha)
    assert_close(s.sum(), alpha.sum(), rtol=1e-10, atol=0)
    assert (s >= 0).all()


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"\bvectors\b"):
        compact_wy(torch.ones(3))
    for turn in (rotate, rotate_inverse):
        with pytest.raises(ValueError, match=r"\bx\b"):
            turn(compact_wy(torch.ones(1, 3)), torch.ones(2, 4))
