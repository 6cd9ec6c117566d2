"""Results of lanes that differ in shape, and nested tensors as arguments: against the loop over the examples."""

import warnings

import pytest
import torch
from torch.utils._pytree import tree_flatten

from lanewise import grad, hessian, jacrev, vmap
from tests.oracles import assert_same

XS = torch.tensor([[2.0, -1.0, 0.5], [1.0, 7.0, 3.0], [-1.0, 1.0, -2.0], [-1.0, -1.0, -1.0]], dtype=torch.float64)
LENGTHS = (3, 1, 3, 0, 2)
ROWS = [torch.randn(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
JAGGED = "jagged"


@pytest.fixture(params=["converted", "as written"], autouse=True)
def way(request, monkeypatch):
    """Lanes part in converted code, or the function is run again."""
    if request.param == "as written":
        monkeypatch.setattr("lanewise._control.runs.split.converted", lambda func: None)


def nested(rows=ROWS, requires_grad=False):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged).detach().clone().requires_grad_(requires_grad)


LISTS = {
    "mask": lambda x: x[x > 0],
    "same shape": lambda x: x * 2,
    "structure": lambda x: {"kept": x[x > 0] ** 2, "count": int((x > 0).sum()), "name": "a" if x[0] > 1 else None},
    "other structure": lambda x: (x, x[0]) if x[0] > 0 else [x.sum()],
    "number": lambda x: x.sum().item(),
    "one number": lambda x: 3,
    "captured": lambda x: XS,
    "nothing": lambda x: (),
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("chunk_size", [None, 1, 3])
def test_list(name, chunk_size):
    f = LISTS[name]
    got = vmap(f, out_dims="list", chunk_size=chunk_size)(XS)
    want = [f(x) for x in XS]
    assert type(got) is list
    for one, other in zip(got, want, strict=True):
        leaves, spec = tree_flatten(one)
        others, other_spec = tree_flatten(other)
        assert spec == other_spec
        for a, b in zip(leaves, others, strict=True):
            assert type(a) is type(b) and (torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b)
    assert vmap(f, out_dims="list")(XS[:0]) == []


def test_list_in_a_structure():
    got, rest = vmap(lambda x: (x.sum(), {"kept": x[x > 0], "all": x}), out_dims=(0, {"kept": "list", "all": 1}))(XS)
    assert_same(got, XS.sum(1))
    assert_same(rest["all"], XS.T)
    assert_same(rest["kept"], [x[x > 0] for x in XS])


def test_list_gradients():
    xs = XS.clone().requires_grad_()
    got = vmap(lambda x: x[x > 0] ** 2, out_dims="list")(xs)
    (gradient,) = torch.autograd.grad(sum(i * y.sum() for i, y in enumerate(got)), xs)
    (want,) = torch.autograd.grad(sum(i * (x[x > 0] ** 2).sum() for i, x in enumerate(xs)), xs)
    assert_same(gradient, want)


def test_list_results_are_tensors_of_their_own():
    got = vmap(lambda x: x, out_dims="list")(XS)
    got[0].zero_()
    assert XS[0].any() and got[1].equal(XS[1]) and got[1].untyped_storage().nbytes() == 3 * 8


def test_nested_lists():
    xs = torch.stack([XS, XS.flip(0)])
    got = vmap(vmap(lambda x: x[x > 0], out_dims="list"), out_dims="list")(xs)
    for row, inputs in zip(got, xs, strict=True):
        assert_same(row, [x[x > 0] for x in inputs])
    got = vmap(vmap(lambda x: x[x > 0], out_dims="list"))(torch.stack([XS, XS * 2]))
    assert_same(got, [torch.stack([x[x > 0], 2 * x[x > 0]]) for x in XS])
    with pytest.raises(RuntimeError, match=r"output\[0\]: lanes return tensors of different shapes.* lane 1 gives"):
        vmap(vmap(lambda x: x[x > 0], out_dims="list"))(xs)


@pytest.mark.parametrize("chunk_size", [None, 1, 3])
def test_jagged(chunk_size):
    xs = XS.clone().requires_grad_()
    got = vmap(lambda x: x[x > 0] ** 2, out_dims=JAGGED, chunk_size=chunk_size)(xs)
    want = [x[x > 0] ** 2 for x in xs]
    assert got.layout is torch.jagged
    assert_same(list(got.unbind()), want)
    weights = torch.arange(1.0, 1 + got.values().shape[0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad((got.values() * weights).sum(), xs)
    (wanted,) = torch.autograd.grad((torch.cat(want) * weights).sum(), xs)
    assert_same(gradient, wanted)


def test_jagged_without_parting():
    got, total = vmap(lambda x: (x.outer(x), x.sum()), out_dims=(JAGGED, 0))(XS)
    assert_same(list(got.unbind()), [x.outer(x) for x in XS])
    assert_same(total, XS.sum(1))
    assert vmap(lambda x: x[x > 0], out_dims=JAGGED)(XS[:0]).shape[0] == 0


def test_jagged_promotes():
    got = vmap(lambda x: x[x > 0] if x[0] > 1 else x.float(), out_dims=JAGGED)(XS)
    assert_same(list(got.unbind()), [(x[x > 0] if x[0] > 1 else x.float()).double() for x in XS])


def test_jagged_under_grad():
    def f(scale):
        return vmap(lambda x: (scale * x)[x > 0] ** 2, out_dims=JAGGED)(XS).values().sum()

    scale = torch.ones(3, dtype=torch.float64)
    assert_same(grad(f)(scale), sum(2 * x**2 * (x > 0) for x in XS))


def test_jagged_refusals():
    with pytest.raises(RuntimeError, match=r"differ in their first dim only: lane \d gives \[1, \d\], lane \d gives"):
        vmap(lambda x: x[x > 0][None], out_dims=JAGGED)(XS)
    with pytest.raises(RuntimeError, match="output has no dims in a lane"):
        vmap(lambda x: x.sum(), out_dims=JAGGED)(XS)
    with pytest.raises(RuntimeError, match="cannot be made inside another transform"):
        vmap(vmap(lambda x: x[x > 0], out_dims=JAGGED))(XS[None])


def test_shapes_that_differ_name_lanes_and_ways_out():
    with pytest.raises(RuntimeError, match=r"output\[1\]: lanes return tensors of different shapes") as caught:
        vmap(lambda x: (x, x[x > 0]))(XS)
    caught.match(r"lane \d gives \[\d\], lane \d gives \[\d\]")
    assert 'out_dims="list"' in str(caught.value) and 'out_dims="jagged"' in str(caught.value)
    with pytest.raises(RuntimeError, match=r"lane \(0, \d\) gives \[\d\], lane \(0, \d\) gives \[\d\]"):
        vmap(vmap(lambda x: x[x > 0]))(XS[None])


# --- nested tensors as arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_components_are_lanes(chunk_size):
    def f(x, y):
        return (x**2).sum() * y if x.shape[0] > 1 else x.sum() + y

    xs, ys = nested(requires_grad=True), torch.arange(5.0, dtype=torch.float64, requires_grad=True)
    xs_loop = nested(requires_grad=True)
    got = vmap(f, chunk_size=chunk_size)(xs, ys)
    want = torch.stack([f(x, y) for x, y in zip(xs_loop.unbind(), ys, strict=True)])
    assert_same(got, want)
    (for_xs, for_ys) = torch.autograd.grad(got.sin().sum(), [xs, ys])
    (want_xs, want_ys) = torch.autograd.grad(want.sin().sum(), [xs_loop, ys])
    assert_same(for_xs.values(), want_xs.values())
    assert_same(for_ys, want_ys)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_jagged_in_and_out(chunk_size):
    xs = nested()
    got = vmap(lambda x: x.sin(), out_dims=JAGGED, chunk_size=chunk_size)(xs)
    assert_same((got + xs).values(), torch.cat([x.sin() + x for x in ROWS]))  # of the same ragged shape


def test_components_under_vmap_and_without_lanes():
    xs, ys = nested(), torch.arange(3.0, dtype=torch.float64)
    got = vmap(lambda y: vmap(lambda x: (x * y).sum())(xs))(ys)
    assert_same(got, torch.stack([torch.stack([(x * y).sum() for x in ROWS]) for y in ys]))
    none = torch.nested.nested_tensor_from_jagged(torch.zeros(0, 2), torch.tensor([0]))
    assert vmap(lambda x: x.sum(0))(none).shape == (0, 2)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_components_are_written_to_in_place(chunk_size):
    """By the lanes that return, each run, whatever it has done to others that run again."""

    def f(x):
        x[:1] += 1
        if x.sum() > 0:
            x.mul_(2)
        return x.sum(), (x[:1] * 3).mul_(2)

    rows = [sign * row.clone() for row in ROWS for sign in (1, -1, 2)]
    xs = nested(rows)
    got = vmap(f, out_dims=(0, JAGGED), chunk_size=chunk_size)(xs)
    want = [f(row) for row in rows]
    assert_same(xs.values(), torch.cat(rows))
    assert_same(got[0], torch.stack([total for total, _ in want]))
    assert_same(got[1].values(), torch.cat([row for _, row in want]))
    tracked = nested().requires_grad_()
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        next(iter(tracked.unbind())).mul_(2)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        vmap(lambda x: x.mul_(2).sum())(tracked)


def test_parts_of_a_sparse_tensor_are_copies():
    def f(x):
        x.mul_(2)
        return torch.sparse.sum(x) if torch.sparse.sum(x) > 3 else -torch.sparse.sum(x)

    xs = torch.diag(torch.tensor([1.0, 2.0, 3.0])).to_sparse()
    assert vmap(f)(xs).tolist() == [f(xs.select(0, lane)).item() for lane in range(3)] == [-2.0, 4.0, 6.0]
    assert xs.to_dense().diagonal().tolist() == [1.0, 2.0, 3.0]


def test_components_refusals():
    with pytest.raises(RuntimeError, match="components are lanes along dim 0, not along dim 1"):
        vmap(torch.sum, in_dims=1)(nested())
    with pytest.raises(ValueError, match="same size in the mapped dimension"):
        vmap(torch.add)(nested(), torch.ones(3))


def test_components_of_strided_layout():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls the layout a prototype
        strided = torch.nested.nested_tensor(ROWS, layout=torch.strided)
        got = vmap(lambda x: (x**2).sum())(strided)
    assert_same(got, torch.stack([(x**2).sum() for x in ROWS]))


def norm_of_some(x):
    return x[x > 0].norm() if x[0] > 0.7 else (x**3).sum()


def sorted_some(x):
    return x[x > 0].sort().values.pow(2).cumsum(0).sum() if x[0] > 0.7 else x.sum()


def entries_of_some(x):
    return torch.outer(x, x)[x > 0, 0].sum() ** 3 if x[0] > 0.7 else (x**3).sum()


def written_some(x):
    return x.index_put((x > 0,), x[x > 0].sin()).norm() if (x > 0).any() else (x**3).sum()


SECOND = {
    "hessian": lambda f: vmap(hessian(f)),
    "jacrev of grad": lambda f: vmap(jacrev(grad(f))),
    "grad of grad": lambda f: vmap(lambda x: torch.stack([grad(lambda x, i: grad(f)(x)[i])(x, i) for i in range(4)])),
}


@pytest.mark.parametrize("f", [norm_of_some, sorted_some, entries_of_some, written_some])
@pytest.mark.parametrize("second", SECOND)
def test_second_derivatives_of_what_lanes_pick_in_a_branch(f, second):
    """Their backward passes pick and write for the lanes of a branch that picked as many, not for all that it has."""
    xs = [[3.0, 0.2, -0.4, 1.5], [-2.0, -0.3, -0.7, -1.1], [0.9, 4.0, 0.05, -3.0], [1.1, 1.2, 1.3, 1.4]]
    xs = torch.tensor(xs, dtype=torch.float64)
    want = torch.stack([torch.autograd.functional.hessian(lambda x: f(x) + 0 * (x**2).sum(), x) for x in xs])
    for _ in range(3):
        torch.testing.assert_close(SECOND[second](f)(xs), want)
