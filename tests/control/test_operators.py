"""`cond`, `switch`, `while_loop`, `fori_loop`, `scan`, `map`, `associative_scan`: against a loop over the examples."""

import pytest
import torch
from torch._higher_order_ops import associative_scan, scan  # private there; this is how users reach them
from torch._higher_order_ops.map import map as torch_map
from torch.autograd.graph import saved_tensors_hooks

import lanewise
from lanewise import errors, grad, hessian, jacfwd, jacrev, jvp, vmap

D = torch.float64


def _examples():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 3, dtype=D, generator=generator), torch.tensor([0, 3, 1, 4, 2])


def _steps(x, k, **options):
    start = (x, torch.tensor(0))
    return lanewise.while_loop(lambda s: s[1] < k, lambda s: (s[0].sin() + x, s[1] + 1), start, **options)[0]


def repeated(x, k):
    return _steps(x, k)


def repeated_masked(x, k):
    return _steps(x, k, mode="mask")


def repeated_checkpointed(x, k):
    return _steps(x, k, checkpoint=True)


def repeated_bounded(x, k):
    return _steps(x, k, max_steps=10)


def repeated_in_repeated(x, k):
    def outer(state):
        c, i = state
        c, _ = lanewise.while_loop(lambda t: t[1] < i, lambda t: (t[0] * 1.1 + x, t[1] + 1), (c, torch.tensor(0)))
        return c, i + 1

    return lanewise.while_loop(lambda s: s[1] < k, outer, (x, torch.tensor(0)))[0]


def repeated_on_a_structure(x, k):
    def body(state):
        first, second = state["v"]
        return {"i": state["i"] + 1, "v": [first + second, first]}

    return lanewise.while_loop(lambda s: s["i"] < k, body, {"i": torch.tensor(0), "v": [x, x * 0 + 1]})["v"][0]


def counted_up_to(x, k):
    return lanewise.fori_loop(0, k, lambda i, c: c * 1.1 + i, x)


def counted_from(x, k):
    return lanewise.fori_loop(k, 5, lambda i, c: c.cos() + i, x)


def counted_masked(x, k):
    return lanewise.fori_loop(0, k, lambda i, c: c * 1.1 + i, x, mode="mask")


def counted_by_numbers(x, k):
    return lanewise.fori_loop(0, 4, lambda i, c: c.sin() + i * k, x)


def chosen(x, k):
    # The square root is no number for lanes of the other side.
    return lanewise.cond(x.sum() > 0, lambda a, b: a.exp() * b, lambda a, b: (-a.sum()).sqrt() * a + b, (x, k))


def chosen_by_torch(x, k):
    return torch.cond(x.sum() > 0, lambda a: a.exp(), lambda a: a.abs().sqrt(), (x,))


def switched(x, k):
    return lanewise.switch(k, [lambda a: a, lambda a: a * 2, lambda a: a.sin(), lambda a: -a], x)


def scanned(x, k):
    carry, ys = lanewise.scan(lambda c, e: (c * 0.5 + e, c * e), x[0], x)
    return ys * carry + k


def scanned_back(x, k):
    carry, ys = lanewise.scan(lambda c, e: (c * 0.5 + e, c * e), torch.ones((), dtype=D), x, reverse=True)
    return ys * carry


def scanned_without_rows(x, k):
    return lanewise.scan(lambda c, _: (c.sin() * k, c.sum()), x, None, length=3)[1]


def scanned_with_a_branch(x, k):
    def step(c, e):
        c = c + e if e > 0 else c * e
        return c, c

    return lanewise.scan(step, torch.ones((), dtype=D), x)[1]


def mapped(x, k):
    return lanewise.map(lambda e: e.sin() if e > 0 else e * e, x)


def mapped_at_once(x, k):
    return lanewise.map(lambda e: e.sin() if e > 0 else e * e, x, batch_size=2)


def prefixes(x, k):
    return lanewise.associative_scan(torch.mul, x) + lanewise.associative_scan(torch.add, x, reverse=True)


PROGRAMS = [
    repeated,
    repeated_masked,
    repeated_checkpointed,
    repeated_bounded,
    repeated_in_repeated,
    repeated_on_a_structure,
    counted_up_to,
    counted_from,
    counted_masked,
    counted_by_numbers,
    chosen,
    chosen_by_torch,
    switched,
    scanned,
    scanned_back,
    scanned_without_rows,
    scanned_with_a_branch,
    mapped,
    mapped_at_once,
    prefixes,
]


def _gradient(f, x, k):
    leaf = x.clone().requires_grad_()
    out = f(leaf, k).sum()
    return torch.autograd.grad(out, leaf)[0] if out.requires_grad else torch.zeros_like(x)


def _columns(f, x, step=1e-6):
    """df/dx by central differences, the last dim that of x."""
    columns = []
    for i in range(len(x)):
        h = torch.zeros_like(x)
        h[i] = step
        columns.append((f(x + h) - f(x - h)) / (2 * step))
    return torch.stack(columns, -1)


def _each(f, xs, ks):
    return torch.stack([f(x, k) for x, k in zip(xs, ks)])


def by_vmap(f, xs, ks):
    return vmap(f)(xs, ks), _each(f, xs, ks)


def by_vmap_of_one_count(f, xs, ks):
    return vmap(f, in_dims=(0, None))(xs, ks[1]), torch.stack([f(x, ks[1]) for x in xs])


def by_vmap_vmap(f, xs, ks):
    got = vmap(lambda x: vmap(lambda k: f(x, k))(ks))(xs)
    return got, torch.stack([torch.stack([f(x, k) for k in ks]) for x in xs])


def by_vmap_grad(f, xs, ks):
    return vmap(grad(lambda x, k: f(x, k).sum()))(xs, ks), _each(lambda x, k: _gradient(f, x, k), xs, ks)


def by_grad_vmap(f, xs, ks):
    return grad(lambda xs: vmap(f)(xs, ks).sum())(xs), _each(lambda x, k: _gradient(f, x, k), xs, ks)


def by_vmap_jacfwd(f, xs, ks):
    return vmap(jacfwd(f))(xs, ks), _each(lambda x, k: _columns(lambda x: f(x, k), x), xs, ks)


def by_vmap_jacrev(f, xs, ks):
    return vmap(jacrev(f))(xs, ks), _each(lambda x, k: _columns(lambda x: f(x, k), x), xs, ks)


def by_jvp_vmap(f, xs, ks):
    got = jvp(lambda xs: vmap(f)(xs, ks), (xs,), (torch.ones_like(xs),))[1]
    return got, _each(lambda x, k: _columns(lambda x: f(x, k), x).sum(-1), xs, ks)


def by_vmap_hessian(f, xs, ks):
    got = vmap(hessian(lambda x, k: f(x, k).sum()))(xs, ks)
    return got, _each(lambda x, k: _columns(lambda x: _gradient(f, x, k), x), xs, ks)


@pytest.mark.parametrize(
    "composition",
    [
        by_vmap,
        by_vmap_of_one_count,
        by_vmap_vmap,
        by_vmap_grad,
        by_grad_vmap,
        by_vmap_jacfwd,
        by_vmap_jacrev,
        by_jvp_vmap,
        by_vmap_hessian,
    ],
    ids=lambda c: c.__name__,
)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_as_the_loop(program, composition):
    got, want = composition(program, *_examples())
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_the_others_of_torch_are_served():
    xs = torch.arange(6.0).reshape(2, 3)
    scanned = vmap(lambda x: scan(lambda c, e: (c + e, c * e), torch.zeros(()), x)[1])(xs)
    assert scanned.tolist() == [[0.0, 0.0, 2.0], [0.0, 12.0, 35.0]]
    assert vmap(lambda x: associative_scan(torch.mul, x, 0))(xs + 1).tolist() == [[1, 2, 6], [4, 20, 120]]
    assert vmap(lambda x: torch_map(lambda e: e * 2, x))(xs).tolist() == (xs * 2).tolist()
    counted = vmap(lambda x: torch.while_loop(lambda i: i < x.sum(), lambda i: (i + 2,), (x[0] * 0,))[0])(xs)  # type: ignore[attr-defined]
    assert counted.tolist() == [4.0, 12.0]


# --- cost ------------------------------------------------------------------------------------------------------------


def test_a_branch_not_taken_is_not_called():
    called = []

    def other(x):
        called.append(1)
        return x

    xs = torch.rand(3) + 1
    vmap(lambda x: lanewise.cond(x > 0, torch.sqrt, other, (x,)))(xs)
    vmap(lambda x: lanewise.switch((x > 0).long(), [other, torch.sqrt], x))(xs)
    assert not called


def _kept(run, x):
    """How many tensors are kept for the backward pass of `run(x)`."""
    count = 0

    def pack(tensor):
        nonlocal count
        count += 1
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run(x)
    return count


def test_checkpoints_keep_the_square_root_of_the_states():
    x = torch.rand(3, requires_grad=True)

    def steps(count, checkpoint):
        return lambda x: lanewise.fori_loop(0, count, lambda i, c: c.sin(), x, checkpoint=checkpoint)

    few, many = _kept(steps(100, True), x), _kept(steps(400, True), x)
    assert many < 2.5 * few
    assert _kept(steps(400, False), x) == 400
    torch.testing.assert_close(
        torch.autograd.grad(steps(50, True)(x).sum(), x), torch.autograd.grad(steps(50, False)(x).sum(), x)
    )


def test_scan_takes_its_rows_apart_once():
    x = torch.rand(50, 3, requires_grad=True)
    out = lanewise.scan(lambda c, e: (c + e, c * e), torch.zeros(3), x)[1].sum()
    nodes, stack = set(), [out.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            stack.extend(following for following, _ in node.next_functions)
    assert sum(type(node).__name__ == "UnbindBackward0" for node in nodes) == 1
    assert not any(type(node).__name__ == "SelectBackward0" for node in nodes)


# --- edges and errors ------------------------------------------------------------------------------------------------


def test_no_steps():
    x = torch.zeros(0, 3)
    carry, ys = lanewise.scan(lambda c, e: (c + e, (c, e[:2])), torch.ones(3), x)
    assert carry.tolist() == [1, 1, 1]
    assert [y.shape for y in ys] == [(0, 3), (0, 2)]
    assert lanewise.associative_scan(torch.add, x).shape == (0, 3)
    assert lanewise.fori_loop(3, 3, lambda i, c: c + 1, 7) == 7
    nothing = vmap(lambda x: lanewise.while_loop(lambda s: s < 3, lambda s: s + 1, x))(torch.zeros(0))
    assert nothing.shape == (0,)


def test_the_axis_of_an_associative_scan():
    x = torch.arange(1.0, 7).reshape(2, 3)
    assert torch.equal(lanewise.associative_scan(torch.mul, x, axis=1), x.cumprod(1))
    both = lanewise.associative_scan(lambda a, b: {"s": a["s"] + b["s"]}, {"s": x}, reverse=True, axis=-1)["s"]
    assert torch.equal(both, x.flip(1).cumsum(1).flip(1))


def test_an_index_out_of_range_is_clamped():
    branches = [lambda x: x, lambda x: x * 10]
    got = vmap(lambda i, x: lanewise.switch(i, branches, x))(torch.tensor([-3, 0, 1, 9]), torch.ones(4))
    assert got.tolist() == [1, 1, 10, 10]
    assert lanewise.switch(7, branches, 2) == 20


ERRORS = {
    "operands that are a tensor": (
        lambda x: lanewise.cond(x.sum() > 0, torch.sin, torch.cos, x),
        TypeError,
        r"cond: operands must be a sequence of arguments, got a tensor.*\(x,\)",
    ),
    "no branches": (lambda x: lanewise.switch(x[0] > 0, [], x), ValueError, "switch: there are no branches"),
    "an unknown mode": (
        lambda x: lanewise.while_loop(lambda s: s.sum() < 3, lambda s: s + 1, x, mode="maks"),  # type: ignore[arg-type]
        ValueError,
        'while_loop: mode is \'maks\', not "compact" or "mask"',
    ),
    "an unknown mode of a counted loop": (
        lambda x: lanewise.fori_loop(0, 3, lambda i, s: s, x, mode="maks"),  # type: ignore[arg-type]
        ValueError,
        "fori_loop: mode is 'maks'",
    ),
    "too many steps": (
        lambda x: lanewise.while_loop(lambda s: s.sum() < 1e9, lambda s: s + 1, x, max_steps=5),
        RuntimeError,
        "after max_steps=5 steps",
    ),
    "too many steps under a mask": (
        lambda x: lanewise.while_loop(lambda s: s.sum() < 1e9, lambda s: s + 1, x, max_steps=5, mode="mask"),
        RuntimeError,
        "after max_steps=5 steps",
    ),
    "another structure": (
        lambda x: lanewise.while_loop(lambda s: s[0].sum() < 9, lambda s: s[0] + 1, (x,), mode="mask"),
        RuntimeError,
        "body_fun returns a state of another structure",
    ),
    "rows of different numbers": (
        lambda x: lanewise.scan(lambda c, e: (c, e), 0, (x, x[:1])),
        ValueError,
        r"scan: xs are tensors with one first dim.*\[\[2\], \[1\]\]",
    ),
    "no rows and no length": (lambda x: lanewise.scan(lambda c, e: (c, e), x), ValueError, "length=None"),
    "another length": (
        lambda x: lanewise.scan(lambda c, e: (c, e), 0, x, length=7),
        ValueError,
        "length=7, but xs have 2 steps",
    ),
    "different lengths to combine": (
        lambda x: lanewise.associative_scan(lambda a, b: a, (x, x[:1])),
        ValueError,
        "lengths along axis 0 differ",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("inside", [False, True])
def test_errors(name, inside):
    f, kind, message = ERRORS[name]
    with pytest.raises(kind, match=f"(?s){message}"):
        vmap(f)(torch.rand(4, 2)) if inside else f(torch.rand(2))
    assert vmap(torch.sin)(torch.zeros(2)).tolist() == [0, 0]  # nothing is left behind


def test_lanes_whose_sides_do_not_match():
    with pytest.raises(RuntimeError, match=r"(?s)lane 0.*\[2\].*lane 1.*\[1\]"):
        vmap(lambda x: lanewise.cond(x[0] > 0, lambda x: x, lambda x: x[:1], (x,)))(torch.tensor([[1.0, 2], [-1, 2]]))


@pytest.mark.parametrize("mode", ["compact", "mask"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_too_many_steps_name_the_lanes(mode, checkpoint):
    def f(v):
        return lanewise.while_loop(
            lambda s: s < 10, lambda s: s + v.abs(), v * 0, max_steps=20, mode=mode, checkpoint=checkpoint
        )

    v = torch.tensor([1.0, 0.0, 3.0, 0.01])
    with pytest.raises(errors.TransformError, match="max_steps=20 steps") as raised:
        vmap(f)(v)
    assert raised.value.lanes == [1, 3]
    with pytest.raises(errors.TransformError) as raised:
        vmap(vmap(f))(torch.stack([v, v + 1]))
    assert raised.value.lanes == [(0, 1), (0, 3)]
    with pytest.raises(errors.TransformError) as raised:
        f(v[1])
    assert not hasattr(raised.value, "lanes")
