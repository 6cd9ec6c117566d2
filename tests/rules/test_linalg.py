"""Linear algebra against the loop."""

import pytest
import torch

from lanewise import grad, vmap
from lanewise._core.batch import BatchLevel
from lanewise._rules.batch import einsum
from tests.oracles import assert_same
from tests.rules.lanes import check, ints, normal

L = torch.linalg


def spd(*shape):
    """Symmetric, positive definite, eigenvalues apart."""

    def make(g):
        a = torch.randn(shape, generator=g, dtype=torch.float64)
        return a @ a.mT / shape[-1] + torch.diag(torch.arange(1.0, shape[-1] + 1, dtype=torch.float64))

    return make


def regular(*shape):
    return lambda g: torch.randn(shape, generator=g, dtype=torch.float64) / 3 + torch.eye(shape[-2], shape[-1]).double()


def lower(*shape):
    return lambda g: regular(*shape)(g).tril()


def complex_normal(*shape):
    return normal(*shape, dtype=torch.complex128)


CASES = {
    "det": (L.det, regular(3, 3)),
    "det batch": (L.det, regular(2, 3, 3)),
    "slogdet": (L.slogdet, regular(3, 3)),
    "logdet": (torch.logdet, spd(3, 3)),
    "inv": (L.inv, regular(3, 3)),
    "inv batch": (L.inv, regular(2, 3, 3)),
    "eigh": (lambda a: (L.eigh(a)[0], L.eigh(a)[1].abs()), spd(3, 3)),
    "eigvalsh": (L.eigvalsh, spd(2, 3, 3)),
    "eigvals": (lambda a: L.eigvals(a).real.sort()[0], spd(3, 3)),
    "eig": (lambda a: L.eig(a)[0].real.sort()[0], spd(3, 3)),
    "svd": (lambda a: (L.svd(a, full_matrices=False)[1], L.svd(a, full_matrices=False)[0].abs()), regular(4, 3)),
    "svdvals": (L.svdvals, regular(3, 4)),
    "qr": (L.qr, regular(4, 3)),
    "cholesky": (L.cholesky, spd(3, 3)),
    "cholesky upper": (lambda a: L.cholesky(a, upper=True), spd(2, 3, 3)),
    "cholesky_inverse": (torch.cholesky_inverse, lower(3, 3)),
    "lu": (lambda a: L.lu(a)[1:], regular(3, 3)),
    "lu_factor": (lambda a: L.lu_factor(a), regular(4, 3)),
    "lu_unpack": (lambda a: torch.lu_unpack(*L.lu_factor(a)), regular(2, 3, 3)),
    "matrix_exp": (L.matrix_exp, regular(3, 3)),
    "pinv": (L.pinv, regular(4, 3)),
    "pinv tolerance": (lambda a, t: L.pinv(a, rtol=1 / (t + 1e6)), regular(2, 4, 3), ints(1, 9, 2)),
    "matrix_rank": (L.matrix_rank, regular(4, 3)),
    "matrix_rank above": (lambda a, t: L.matrix_rank(a, tol=t.exp()), regular(4, 3), normal()),
    "matrix_rank of symmetric": (
        lambda a, t: L.matrix_rank(a.mT @ a, atol=t, hermitian=True),
        regular(2, 4, 3),
        normal(2),
    ),
    "matrix_rank by shares": (lambda a, r: L.matrix_rank(a, rtol=r.sigmoid()), regular(2, 4, 3), normal(2)),
    "matrix_rank by both": (
        lambda a, t, r: L.matrix_rank(a, atol=t, rtol=r.sigmoid()),
        regular(3, 3),
        normal(),
        normal(),
    ),
    "matrix_rank of nothing": (lambda a, t: L.matrix_rank(a, tol=t), normal(0, 3), normal()),
    "matrix_norm": (L.matrix_norm, regular(2, 4, 3)),
    "nuclear norm": (lambda a: L.matrix_norm(a, "nuc"), regular(4, 3)),
    "cond": (L.cond, regular(3, 3)),
    "vector_norm": (lambda x: L.vector_norm(x, 3, dim=(0, -1)), normal(2, 3, 4)),
    "cross": (lambda x, y: L.cross(x, y, dim=0), normal(3, 4), normal(3, 4)),
    "cross broadcast": (L.cross, normal(1, 3), normal(4, 3)),
    "householder": (L.householder_product, normal(4, 3), normal(3)),
    "matrix_power": (lambda a: L.matrix_power(a, 3), regular(3, 3)),
    "multi_dot": (lambda a, b, c: L.multi_dot((a, b, c)), normal(2, 3), normal(3, 4), normal(4)),
    "solve vector": (L.solve, regular(3, 3), normal(3)),
    "solve matrix": (L.solve, regular(3, 3), normal(3, 2)),
    "solve square": (L.solve, regular(3, 3), normal(3, 3)),
    "solve batch of vectors": (L.solve, regular(2, 3, 3), normal(2, 3)),
    "solve batch of matrices": (L.solve, regular(2, 3, 3), normal(2, 3, 1)),
    "solve vector for a batch": (L.solve, regular(2, 3, 3), normal(3)),
    "solve matrix for a batch": (L.solve, regular(2, 3, 3), normal(3, 4)),
    "solve batch for one": (L.solve, regular(3, 3), normal(2, 3, 4)),
    "solve right": (lambda a, b: L.solve(a, b, left=False), regular(3, 3), normal(2, 3)),
    "solve right batch": (lambda a, b: L.solve(a, b, left=False), regular(3, 3), normal(4, 2, 3)),
    "solve_triangular": (lambda a, b: L.solve_triangular(a, b, upper=False), lower(3, 3), normal(3, 2)),
    "solve_triangular batch": (lambda a, b: L.solve_triangular(a, b, upper=False), lower(2, 3, 3), normal(3, 2)),
    "solve_triangular right": (
        lambda a, b: L.solve_triangular(a, b, upper=False, left=False, unitriangular=True),
        lower(3, 3),
        normal(5, 2, 3),
    ),
    "lu_solve": (lambda a, b: L.lu_solve(*L.lu_factor(a), b), regular(3, 3), normal(3, 2)),
    "lu_solve batch": (lambda a, b: L.lu_solve(*L.lu_factor(a), b, adjoint=True), regular(2, 3, 3), normal(3, 2)),
    "cholesky_solve": (torch.cholesky_solve, normal(3, 2), lower(3, 3)),
    "cholesky_solve batch": (lambda b, a: torch.cholesky_solve(b, a), normal(3, 2), lower(2, 3, 3)),
    "lstsq vector": (lambda a, b: L.lstsq(a, b).solution, regular(2, 4, 3), normal(2, 4)),
    "lstsq": (lambda a, b: L.lstsq(a, b).solution, regular(4, 3), normal(4, 2)),
    "tensorsolve": (L.tensorsolve, lambda g: regular(6, 6)(g).reshape(2, 3, 6), normal(2, 3)),
    "tensorinv": (lambda a: L.tensorinv(a.reshape(2, 3, 6)), regular(6, 6)),
    "vecdot": (L.vecdot, normal(2, 3), normal(3)),
    "complex solve": (L.solve, lambda g: complex_normal(3, 3)(g) + 3 * torch.eye(3), complex_normal(3)),
    "complex det": (L.det, lambda g: complex_normal(3, 3)(g) + 3 * torch.eye(3)),
    "complex eigh": (lambda a: L.eigvalsh(a + a.mH), complex_normal(3, 3)),
    "mm": (torch.mm, normal(2, 3), normal(3, 4)),
    "mm few columns": (lambda a, b: torch.mm(a, b).view(-1), normal(60, 40), normal(40, 3)),
    "mm tall": (lambda a, b: torch.mm(a.T, b).view(-1), normal(3, 20), normal(3, 4)),
    "bmm": (torch.bmm, normal(2, 3, 4), normal(2, 4, 2)),
    "mv": (torch.mv, normal(2, 3), normal(3)),
    "dot": (torch.dot, normal(3), normal(3)),
    "vdot": (torch.vdot, complex_normal(3), complex_normal(3)),
    "matmul broadcast": (torch.matmul, normal(2, 1, 3, 4), normal(5, 4, 2)),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), normal(4), normal(2, 3), normal(3, 4)),
    "addmv": (torch.addmv, normal(2), normal(2, 3), normal(3)),
    "addmm few columns": (
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2).view(-1),
        normal(3),
        normal(60, 40),
        normal(40, 3),
    ),
    "addbmm": (torch.addbmm, normal(2, 2), normal(3, 2, 4), normal(3, 4, 2)),
    "baddbmm": (torch.baddbmm, normal(2, 1, 2), normal(2, 3, 4), normal(2, 4, 2)),
    "addr": (torch.addr, normal(2, 3), normal(2), normal(3)),
    "bilinear": (torch.nn.functional.bilinear, normal(2, 3), normal(2, 4), normal(5, 3, 4), normal(5)),
    "bilinear one": (torch.nn.functional.bilinear, normal(3), normal(4), normal(5, 3, 4)),
    "linear": (torch.nn.functional.linear, normal(3), normal(2, 3), normal(2)),
    "einsum": (lambda a, b: torch.einsum("ij,kj->ik", a, b), normal(2, 3), normal(4, 3)),
    "einsum implicit": (lambda a, b: torch.einsum("bA, aA", [a, b]), normal(2, 3), normal(4, 3)),
    "einsum batch": (lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b), normal(2, 3, 2, 2), normal(2, 3, 4, 2)),
    "einsum batch apart": (lambda a, b: torch.einsum("ibj,jkb->kib", a, b), normal(2, 3, 4), normal(4, 2, 3)),
    "einsum turned": (lambda a, b: torch.einsum("ij, jk -> ki", a, b), normal(2, 3), normal(3, 4)),
    "einsum over two": (lambda a, b: torch.einsum("ijk,kjl", a, b), normal(2, 3, 4), normal(4, 3, 2)),
    "einsum column": (lambda a, b: torch.einsum("ij,j->i", a, b), normal(2, 3), normal(3)),
    "einsum row": (lambda a, b: torch.einsum("j,jk->k", a, b), normal(3), normal(3, 2)),
    "einsum dot": (lambda a, b: torch.einsum("i,i", a, b), normal(3), normal(3)),
    "einsum outer": (lambda a, b: torch.einsum("bi,bj->bij", a, b), normal(2, 3), normal(2, 4)),
    "einsum summed apart": (lambda a, b: torch.einsum("ij,jk->k", a, b), normal(2, 3), normal(3, 4)),
    "einsum widened": (lambda a, b: torch.einsum("ij,jk->ik", a, b), normal(2, 1), normal(3, 4)),
    "einsum ellipsis": (lambda a, b: torch.einsum("...ij,...j->...i", a, b), normal(5, 2, 3), normal(3)),
    "einsum implicit ellipsis": (lambda a, b: torch.einsum("i...,i", a, b), normal(2, 3, 2), normal(2)),
    "einsum trace": (lambda a: torch.einsum("ii", a), normal(3, 3)),
    "einsum three": (lambda a, b, c: torch.einsum("ij,jk,k->i", a, b, c), normal(3, 2), normal(2, 4), normal(4)),
    "einsum sublists": (lambda a, b: torch.einsum(a, [0, 1], b, [2, 1], [0, 2]), normal(2, 3), normal(4, 3)),
    "kron": (torch.kron, normal(2, 3), normal(2, 2)),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=([0, 1], [1, 0])), normal(2, 3), normal(3, 2, 2)),
}
NO_GRADIENT = {
    "geqrf": (torch.geqrf, regular(4, 3)),
    "ormqr": (lambda a, t, c: torch.ormqr(a, t, c), normal(4, 3), normal(3), normal(4, 2)),
    "ldl_factor": (L.ldl_factor, spd(3, 3)),
    "ldl_solve": (lambda a, b: L.ldl_solve(*L.ldl_factor(a), b), spd(3, 3), normal(3, 2)),
    "ldl_solve batch": (lambda a, b: L.ldl_solve(*L.ldl_factor(a), b), spd(2, 3, 3), normal(2, 3, 2)),
    "lstsq parts": (lambda a, b: tuple(L.lstsq(a, b, driver="gelsd"))[::2], regular(4, 3), normal(4, 2)),
    "inv_ex": (L.inv_ex, regular(3, 3)),
    "cholesky_ex": (L.cholesky_ex, spd(3, 3)),
    "solve_ex": (lambda a, b: tuple(L.solve_ex(a, b)), regular(3, 3), normal(3)),
}


@pytest.mark.parametrize("name", CASES)
def test_as_in_the_loop(name):
    f, *makers = CASES[name]
    check(f, *makers)


@pytest.mark.parametrize("name", NO_GRADIENT)
def test_values_as_in_the_loop(name):
    f, *makers = NO_GRADIENT[name]
    check(f, *makers, grad=False)


@pytest.mark.parametrize("driver", ["gels", "gelsd"])
def test_parts_of_a_solution_that_have_no_elements_keep_their_history(driver):
    a, b = torch.randn(4, 2, 3), torch.randn(4, 2, 3)

    def parts(a, b):
        return L.lstsq(a, b, driver=driver)[:2]

    expected = tuple(map(torch.stack, zip(*map(parts, a.requires_grad_(), b))))
    got = vmap(parts)(a, b)
    assert_same(got, expected)
    assert [t.requires_grad for t in got] == [t.requires_grad for t in expected]
    for _ in range(2):
        assert not grad(lambda a: sum(t.sum() for t in vmap(parts)(a, b)))(a.detach()).requires_grad


def test_singular_lane_is_named():
    a = torch.stack([torch.eye(2), torch.zeros(2, 2), torch.eye(2)])
    with pytest.raises(L.LinAlgError, match="singular") as caught:
        vmap(L.inv)(a)
    assert caught.value.lanes == [1]


def test_lu_unpack_refuses_pivots_of_another_shape():
    lu, pivots = L.lu_factor(torch.eye(3).expand(2, 3, 3))
    with pytest.raises(RuntimeError, match=r"LU_data \[3, 3\] needs LU_pivots \[3\], got \[2\]"):
        vmap(torch.lu_unpack)(lu, pivots[:, :2].contiguous())


def test_unmapped_matrix_is_factored_once(monkeypatch):
    calls = []
    kernel = torch.ops.aten._linalg_solve_ex

    def count(a, b, **options):
        calls.append((list(a.shape), list(b.shape)))
        return kernel(a, b, **options)

    monkeypatch.setattr("lanewise._rules.batch.linalg.aten._linalg_solve_ex", count, raising=False)
    vmap(lambda b: L.solve(torch.eye(3), b))(torch.ones(7, 3))
    assert calls == [([3, 3], [3, 7])]


@pytest.mark.parametrize(
    "f", [L.det, lambda a: L.slogdet(a)[1], lambda a: L.solve(a, a[0]).sum(), lambda a: L.inv(a).sum()]
)
def test_gradient_with_lanes_far_apart_in_memory(f):
    a = torch.randn(6, 3, 3, dtype=torch.float64)

    def slope(a):
        a = a.view_as(a).requires_grad_()
        return torch.autograd.grad(f(a), a)[0]

    for lanes in (a[::2], a.mT[1::2], a[:3].permute(1, 2, 0).contiguous().permute(2, 0, 1)):
        assert_same(vmap(slope)(lanes), torch.stack([slope(lane) for lane in lanes]))


def _solved_again(a, b):
    _, lu, pivots, _ = torch.ops.aten._linalg_solve_ex(a, b)
    return torch.linalg.lu_solve(lu, pivots, b)


def _solved_with_ldl(a, b):
    return torch.linalg.ldl_solve(*torch.linalg.ldl_factor(a + a.mT), b)


@pytest.mark.parametrize("batch", [(), (1,), (1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("f", [_solved_again, _solved_with_ldl])
def test_factors_of_batches_of_one(f, batch):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, *batch, 4, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    assert_same(vmap(f)(a, b), torch.stack([f(*lane) for lane in zip(a, b, strict=True)]))
    # The kernels step through the factors by the last stride of their batch, which for one lane alone means nothing.
    odd = [4 * 4 * 3, *[5] * len(batch), 1, 4]
    if set(batch) <= {1}:
        lu, pivots = torch.linalg.lu_factor(a)
        lu = torch.empty(200, dtype=torch.float64).as_strided(lu.shape, odd).copy_(lu)
        assert_same(vmap(torch.linalg.lu_solve)(lu, pivots, b), torch.linalg.solve(a, b))


def test_recorded_einsum_is_one_product(monkeypatch):
    a, b = torch.randn(3, 2, 4, 5), torch.randn(3, 2, 6, 5)
    f = lambda a, b: torch.einsum("hij,hkj->hik", a, b).sin().sum()
    want = torch.stack([grad(f)(*lane) for lane in zip(a, b)])
    monkeypatch.setattr(einsum, "_plain", None)
    assert_same(vmap(grad(f))(a, b), want, (1e-5, 1e-6))


def test_einsum_is_one_call(monkeypatch):
    calls = []
    wrap = BatchLevel.wrap
    monkeypatch.setattr(BatchLevel, "wrap", lambda level, value: calls.append(value.shape) or wrap(level, value))
    a, b = torch.randn(3, 4, 5), torch.randn(3, 6, 5)
    got = vmap(lambda a, b: torch.einsum("ij,kj->ik", a, b))(a, b)
    assert_same(got, a @ b.mT, (1e-5, 1e-6))
    assert calls == [a.shape, b.shape, got.shape]
    with pytest.raises(RuntimeError, match="subscript"):
        vmap(lambda a, b: torch.einsum("ijk,kj->ik", a, b))(a, b)


@pytest.mark.parametrize("op", [torch.dot, torch.vdot])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64, torch.complex64])
def test_products_of_vectors_keep_the_dtype(op, dtype):
    xs = torch.arange(6).reshape(2, 3).to(dtype)
    assert_same(vmap(op)(xs, xs + 1), torch.stack([op(x, y) for x, y in zip(xs, xs + 1)]))


@pytest.mark.parametrize("op", [torch.dot, torch.vdot])
def test_products_of_vectors_that_an_example_refuses(op):
    xs = torch.ones(2, 3)
    with pytest.raises(NotImplementedError, match="not implemented for 'Bool'"):
        vmap(op)(xs > 0, xs > 0)
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        vmap(op)(xs, xs[:, :1])


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.addmv(torch.ones(3), x[None], x),
        lambda x: torch.addmv(x.sum().expand(3), torch.ones(1, 3), torch.ones(3)),
        lambda x: torch.addr(torch.ones(3, 3), x[:1], x),
        lambda x: torch.addbmm(torch.ones(3, 3), x.expand(2, 1, 3), torch.ones(2, 3, 3)),
    ],
)
def test_a_bias_larger_than_the_product_is_refused(f):
    xs = torch.ones(2, 3)
    for run in (lambda: f(xs[0]), lambda: vmap(f)(xs)):
        with pytest.raises(RuntimeError, match="size"):
            run()
