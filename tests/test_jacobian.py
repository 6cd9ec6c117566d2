"""Jacobians and Hessians against autograd row by row, differences and closed forms; trees, chunks, complex numbers."""

from collections import namedtuple

import pytest
import torch

import lanewise as lw
from lanewise._core.dual import DualLevel
from lanewise._core.level import Level
from lanewise.errors import ArgumentError, TransformError
from tests.oracles import difference

D = torch.float64
C = torch.complex128
Pair = namedtuple("Pair", "a b")


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = D) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def close(got: torch.Tensor, want: torch.Tensor, tol: float = 1e-10) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, (got.shape, want.shape, got.dtype, want.dtype)
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)


def rows(f, x: torch.Tensor) -> torch.Tensor:
    """The Jacobian `[*y, *x]` of a real function, a row at a time."""
    x = x.detach().clone().requires_grad_()
    y = f(x)
    found = [torch.autograd.grad(e, x, retain_graph=True, allow_unused=True)[0] for e in y.reshape(-1)]
    found = [torch.zeros_like(x) if g is None else g for g in found]
    return torch.stack(found).reshape(*y.shape, *x.shape) if found else x.new_zeros(*y.shape, *x.shape)


JACOBIANS = {"jacrev": lw.jacrev, "jacfwd": lw.jacfwd}
both = pytest.mark.parametrize("jac", JACOBIANS.values(), ids=JACOBIANS)

FUNCTIONS = {
    "sin": (torch.sin, (5,)),
    "to a matrix": (lambda x: torch.outer(x, x.cos()), (3,)),
    "to a scalar": (lambda x: (x**3).sum(), (2, 3)),
    "scalar to vector": (lambda x: x * torch.arange(3, dtype=D), ()),
    "matrix to matrix": (lambda x: x @ x.T, (2, 3)),
    "one part unused": (lambda x: x[:1] * 2, (3,)),
    "nothing out": (lambda x: x[:0] * 2, (3,)),
    "constant": (lambda x: torch.ones(2, dtype=D), (3,)),
    "in place": (lambda x: x.clone().mul_(x).cumsum(0), (4,)),
}


@both
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(jac, name):
    f, shape = FUNCTIONS[name]
    x = seeded(*shape)
    want = rows(f, x) if name != "constant" else torch.zeros(2, 3, dtype=D)
    close(jac(f)(x), want)
    assert not jac(f)(x).requires_grad


@both
@pytest.mark.parametrize("name", ["sin", "to a matrix", "matrix to matrix"])
@pytest.mark.parametrize("chunk_size", [1, 2, 4, 100, "auto"])
def test_chunks_change_nothing(jac, name, chunk_size):
    f, shape = FUNCTIONS[name]
    x = seeded(*shape)
    close(jac(f, chunk_size=chunk_size)(x), rows(f, x))


def test_preallocation_changes_nothing():
    f, shape = FUNCTIONS["matrix to matrix"]
    x = seeded(*shape)
    for chunk_size in (None, 1, 3):
        close(lw.jacrev(f, chunk_size=chunk_size, _preallocate_and_copy=True)(x), rows(f, x))


def test_jacrev_runs_the_function_once():
    calls = []
    lw.jacrev(lambda x: calls.append(1) or x.sin(), chunk_size=2)(seeded(5))
    assert len(calls) == 1
    calls.clear()
    lw.jacfwd(lambda x: calls.append(1) or x.sin())(seeded(5))
    assert len(calls) == 1


@both
def test_argnums(jac):
    x, y = seeded(3), seeded(2, seed=1)
    f = lambda x, y: torch.outer(x, y**2)
    dx, dy = rows(lambda x: f(x, y), x), rows(lambda y: f(x, y), y)
    close(jac(f)(x, y), dx)
    close(jac(f, argnums=1)(x, y), dy)
    close(jac(f, argnums=-1)(x, y), dy)
    got = jac(f, argnums=(1, 0))(x, y)
    assert isinstance(got, tuple)
    close(got[0], dy)
    close(got[1], dx)
    got = jac(f, argnums=None)(x, y)
    close(got[0], dx)
    close(got[1], dy)
    close(jac(lambda x, k: x * k)(x, 3), 3 * torch.eye(3, dtype=D))
    close(jac(lambda x, *, k: x * k)(x, k=3), 3 * torch.eye(3, dtype=D))


@both
def test_the_output_tree_is_outside_and_the_input_tree_inside(jac):
    p = {"w": seeded(2), "pair": Pair(seeded(3, seed=1), [seeded(seed=2)])}
    f = lambda p: (p["w"] * p["pair"].b[0], {"s": p["pair"].a.sum() * p["w"]})
    got = jac(f)(p)
    close(got[0]["w"], p["pair"].b[0] * torch.eye(2, dtype=D))
    close(got[0]["pair"].b[0], p["w"])
    close(got[0]["pair"].a, torch.zeros(2, 3, dtype=D))
    assert type(got[1]["s"]["pair"]) is Pair
    close(got[1]["s"]["pair"].a, p["w"][:, None].expand(2, 3))
    close(got[1]["s"]["w"], p["pair"].a.sum() * torch.eye(2, dtype=D))


@both
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_aux_is_returned_as_it_is(jac, chunk_size):
    note = object()
    x = seeded(3)
    got, aux = jac(lambda x: (x.sin(), {"n": 3, "note": note, "y": x * 2}), has_aux=True, chunk_size=chunk_size)(x)
    close(got, x.cos().diag())
    assert aux["n"] == 3 and aux["note"] is note
    close(aux["y"], 2 * x)
    assert not aux["y"].requires_grad


@both
def test_inside_and_outside_other_transforms(jac):
    x = seeded(4, 3)
    close(lw.vmap(jac(torch.sin))(x), torch.diag_embed(x.cos()))
    close(lw.vmap(jac(torch.sin, chunk_size=2))(x), torch.diag_embed(x.cos()))
    close(lw.grad(lambda x: jac(torch.sin)(x).sum())(x[0]), -x[0].sin())
    close(lw.jvp(jac(torch.sin), (x[0],), (torch.ones(3, dtype=D),))[1], torch.diag(-x[0].sin()))
    close(jac(lw.vmap(torch.sin))(x), rows(torch.sin, x))
    tracked = x[0].clone().requires_grad_()
    got = jac(torch.sin)(tracked)
    assert got.requires_grad
    close(torch.autograd.grad(got.sum(), tracked)[0], -x[0].sin())
    w = seeded(3, seed=1).requires_grad_()
    close(torch.autograd.grad(jac(lambda x: w * x**2)(x[0]).sum(), w)[0], 2 * x[0])
    with torch.no_grad():
        close(jac(lambda x: x**2)(x[0]), torch.diag(2 * x[0]))
        assert not jac(lambda x: w * x)(x[0]).requires_grad


@both
def test_other_dtypes(jac):
    x = seeded(3).float()
    close(jac(torch.sin)(x), x.cos().diag(), 1e-6)
    assert jac(lambda x: x.double() ** 2)(x).dtype is (torch.float64 if jac is lw.jacfwd else torch.float32)
    close(jac(torch.sin)(x.bfloat16()), x.bfloat16().cos().diag(), 1e-2)


def test_one_row_at_a_time_needs_no_batching():
    class Picky(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x * 1

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx, g):
            assert type(g) is torch.Tensor
            return g * (2.0 if g.sum().item() > 0 else 3.0)

    x = seeded(3)
    close(lw.jacrev(Picky.apply, chunk_size=1)(x), 2 * torch.eye(3, dtype=D))
    close(lw.jacfwd(lambda x: x * 2 if x.sum().item() else x, chunk_size=1)(x), 2 * torch.eye(3, dtype=D))


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3])
def test_dropout_has_one_mask_for_all_columns(chunk_size):
    x = seeded(6)
    f = lambda x: torch.nn.functional.dropout(x * 1, 0.5)
    torch.manual_seed(3)
    mask = f(torch.ones(6, dtype=D))
    torch.manual_seed(3)
    close(lw.jacfwd(f, randomness="same", chunk_size=chunk_size)(x), mask.diag())
    torch.manual_seed(3)
    close(lw.jacrev(f, chunk_size=chunk_size)(x), mask.diag())


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_directions_draw_the_same_from_a_generator(chunk_size):
    own = torch.Generator()
    f = lambda x: x**2 * torch.rand(3, generator=own) + torch.zeros(3).uniform_(generator=own) * x
    x = seeded(3)
    own.manual_seed(5)
    want = torch.diag(2 * x * torch.rand(3, generator=own) + torch.rand(3, generator=own))
    own.manual_seed(5)
    close(lw.jacfwd(f, randomness="same", chunk_size=chunk_size)(x), want)


# --- Hessians --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 1, 2, "auto"])
def test_hessian(chunk_size):
    x = seeded(4)
    w = seeded(3, 4, seed=1)
    f = lambda x: torch.tanh(w @ x).square().sum() + (x**3).sum()
    got = lw.hessian(f, chunk_size=chunk_size)(x)
    close(got, torch.autograd.functional.hessian(f, x))
    columns = [difference(lambda y: (lw.grad(f)(y),), (x,), (e,))[0] for e in torch.eye(4, dtype=D)]
    close(got, torch.stack(columns, -1), 1e-6)
    assert not got.requires_grad


def test_hessian_of_several_outputs_and_trees():
    x, y = seeded(2), seeded(3, seed=1)
    f = lambda p: {"u": (p["x"] ** 2).sum() * p["y"].sum(), "v": torch.stack([p["x"].prod(), (p["y"] ** 3).sum()])}
    got = lw.hessian(f)({"x": x, "y": y})
    close(got["u"]["x"]["x"], 2 * y.sum() * torch.eye(2, dtype=D))
    close(got["u"]["x"]["y"], (2 * x)[:, None].expand(2, 3))
    close(got["u"]["y"]["x"], (2 * x).expand(3, 2))
    close(got["v"]["y"]["y"][1], torch.diag(6 * y))
    close(got["v"]["x"]["x"][0], torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=D))
    got = lw.hessian(lambda x, y: (x**2).sum() * y.sum(), argnums=(0, 1))(x, y)
    close(got[0][1], (2 * x)[:, None].expand(2, 3))


def test_hessian_options():
    x = seeded(4)
    got, aux = lw.hessian(lambda x: ((x**3).sum(), {"n": 3, "y": x * 2}), has_aux=True)(x)
    close(got, torch.diag(6 * x))
    assert aux["n"] == 3 and not aux["y"].requires_grad
    close(aux["y"], 2 * x)
    f = lambda x: (torch.nn.functional.dropout(x, 0.5) ** 3).sum()
    torch.manual_seed(1)
    mask = torch.nn.functional.dropout(torch.ones(4, dtype=D), 0.5)
    torch.manual_seed(1)
    close(lw.hessian(f, randomness="same")(x), torch.diag(6 * x * mask**3))
    close(lw.vmap(lw.hessian(lambda x: (x**3).sum()))(seeded(2, 3)), torch.diag_embed(6 * seeded(2, 3)))
    close(lw.jacfwd(lw.jacrev(lambda x: (x**3).sum()))(x), torch.diag(6 * x))
    close(lw.jacfwd(lw.jacfwd(lambda x: (x**3).sum()))(x), torch.diag(6 * x))
    close(lw.jacrev(lw.jacfwd(lambda x: (x**3).sum()))(x), torch.diag(6 * x))


# --- complex numbers -------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("chunk_size", [None, 1, 3])
def test_the_derivative_of_a_holomorphic_function(jac, chunk_size):
    z = seeded(3, dtype=C)
    jac = lambda f, jac=jac: jac(f, chunk_size=chunk_size)
    close(jac(lambda z: z**2)(z), torch.diag(2 * z))
    close(jac(torch.exp)(z), torch.diag(z.exp()))
    m = seeded(2, 3, seed=1, dtype=C)
    close(jac(lambda z: m @ z)(z), m)
    close(jac(lambda z: (m @ z, z * 1j))(z)[1], 1j * torch.eye(3, dtype=C))


@both
def test_complex_out_of_real(jac):
    x = seeded(3)
    close(jac(lambda x: torch.exp(1j * x))(x), torch.diag(1j * torch.exp(1j * x)))


@both
def test_real_out_of_complex_is_as_grad(jac):
    z = seeded(3, dtype=C)
    f = lambda z: (z.abs() ** 2 + z.real).sum()
    close(jac(f)(z), lw.grad(f)(z))
    close(jac(f)(z), 2 * z + 1)
    close(jac(lambda z: z.imag**2)(z), torch.diag(2j * z.imag))


@both
def test_mixed_real_and_complex(jac):
    x, z = seeded(2), seeded(3, dtype=C)
    f = lambda x, z: (x.sum() * z**2, x * z.real.sum())
    got = jac(f, argnums=(0, 1))(x, z)
    close(got[0][0], (z**2)[:, None].expand(3, 2))
    close(got[0][1], torch.diag(2 * x.sum() * z))
    close(got[1][0], z.real.sum() * torch.eye(2, dtype=D))
    close(got[1][1], x[:, None].expand(2, 3).to(C))


@both
@pytest.mark.parametrize("f", [torch.conj, lambda z: z * z.abs(), lambda z: z.real + 0j], ids=["conj", "abs", "real"])
def test_a_function_that_is_not_holomorphic_is_refused(jac, f):
    with pytest.raises(TransformError, match="complex but not holomorphic"):
        jac(f)(seeded(3, dtype=C))


# --- refusals --------------------------------------------------------------------------------------------------------


@both
def test_integers_and_non_tensors(jac):
    with pytest.raises((TransformError, ArgumentError), match="floating point"):
        jac(lambda x: x * 2)(torch.arange(3))
    with pytest.raises(ArgumentError, match="must be Tensor, got <class 'float'> for x"):
        jac(lambda x: x * 2)(2.0)
    with pytest.raises(TransformError, match="Got argnum=2, but only 1 positional inputs"):
        jac(lambda x: x * 2, argnums=2)(seeded(3))
    with pytest.raises(TransformError, match="only tensors, got unsupported type <class 'int'>"):
        jac(lambda x: (x, 3))(seeded(3))


def test_integer_outputs():
    with pytest.raises(TransformError, match="All outputs of f must be floating-point or complex Tensors"):
        lw.jacrev(lambda x: (x, (x > 0).long()))(seeded(3))
    assert lw.jacfwd(lambda x: (x > 0).long())(seeded(3)).equal(torch.zeros(3, 3, dtype=torch.long))


def test_what_carries_no_direction_is_computed_outside_the_planes(monkeypatch):
    """In jacfwd of the outermost plane primals are plain tensors: rules work on them with no level opened below."""
    below = []
    monkeypatch.setattr(
        DualLevel, "below", lambda level, run, *args: below.append(run) or Level.below(level, run, *args)
    )
    w, x = seeded(4, 4, seed=1), seeded(4)

    def f(x):
        return (torch.tanh(w @ x) * x + torch.sin(x) / 2).square() - x

    torch.testing.assert_close(lw.jacfwd(f)(x), torch.autograd.functional.jacobian(f, x))
    assert not below
    # Where somebody outside records, the plane below is entered.
    leaf = x.clone().requires_grad_()
    (got,) = torch.autograd.grad(lw.jacfwd(f)(leaf).sin().sum(), leaf)
    assert below
    (want,) = torch.autograd.grad(torch.autograd.functional.jacobian(f, leaf, create_graph=True).sin().sum(), leaf)
    torch.testing.assert_close(got, want)
