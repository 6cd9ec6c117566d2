"""What vmap takes and gives: in_dims and out_dims of every form, containers, objects, names, what stays as it was."""

import dataclasses
import functools
import inspect
import math
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch

import lanewise as lw
from lanewise._core.level import live_levels
from lanewise._transforms import vmap as vmap_module
from lanewise.errors import ArgumentError, EscapedTensorError

B = 3
Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    label: torch.Tensor
    name: str | None = None


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def equal(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert got.dtype == want.dtype


# --- in_dims ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_an_int_maps_that_dim_of_every_tensor(dim):
    x, y = seeded(3, 3, 3), seeded(3, 3, 3, seed=1)
    got = lw.vmap(lambda a, b: a @ b, in_dims=dim)(x, y)
    equal(got, torch.stack([x.select(dim, i) @ y.select(dim, i) for i in range(3)]))


TREES = {
    "tuple": (lambda t: t[0] * t[1], (seeded(B, 2), seeded(2, B)), (0, 1)),
    "list": (lambda t: t[0] * t[1], [seeded(B, 2), seeded(2)], [0, None]),
    "dict": (lambda t: t["u"] * t["v"], {"u": seeded(2, B), "v": seeded(2)}, {"u": 1, "v": None}),
    "dict in another order": (lambda t: t["u"] * t["v"], {"u": seeded(2, B), "v": seeded(2)}, {"v": None, "u": 1}),
    "OrderedDict": (lambda t: t["u"] * t["v"], OrderedDict(u=seeded(B, 2), v=seeded(2)), {"u": 0, "v": None}),
    "defaultdict": (lambda t: t["u"] * 2, defaultdict(list, u=seeded(B, 2)), 0),
    "named tuple": (lambda t: t.a * t.b, Pair(seeded(2, B), seeded(2)), Pair(1, None)),
    "dataclass": (lambda t: t.x * t.label, Batch(seeded(B, 2), seeded(B)), 0),
    "dataclass by field": (lambda t: t.x * t.label, Batch(seeded(2, B), seeded(2)), Batch(1, None)),
    "return type": (lambda t: t.values * 2, torch.max(seeded(B, 2), dim=1), 0),
    "nested": (
        lambda t: t["p"][0] * t["p"][1].a + t["q"],
        {"p": (seeded(B, 2), Pair(seeded(2), None)), "q": seeded(2, B)},
        {"p": (0, Pair(None, None)), "q": 1},
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_containers_are_taken_apart_and_keep_their_class(name):
    f, tree, in_dims = TREES[name]
    kinds = []

    def seen(t):
        kinds.append(type(t))
        return f(t)

    got = lw.vmap(seen, in_dims=(in_dims,))(tree)
    assert kinds == [type(tree)]
    leaves, spec = torch.utils._pytree.tree_flatten(tree) if "dataclass" not in name else (None, None)
    if leaves is None:
        dims = Batch(0, 0) if in_dims == 0 else in_dims
        lanes = [
            f(Batch(*[v if d is None else v.select(d, i) for v, d in ((tree.x, dims.x), (tree.label, dims.label))]))
            for i in range(B)
        ]
    else:
        # Each tensor of size B somewhere is mapped there; those without are not.
        def lane(leaf, i):
            dims = [d for d, n in enumerate(leaf.shape) if n == B] if isinstance(leaf, torch.Tensor) else []
            return leaf.select(dims[0], i) if dims else leaf

        lanes = [f(torch.utils._pytree.tree_unflatten([lane(leaf, i) for leaf in leaves], spec)) for i in range(B)]
    equal(got, torch.stack(lanes))


def test_none_leaves_are_passed_on():
    seen = []
    got = lw.vmap(lambda x, extra: seen.append(extra) or x * 2)(seeded(B), None)
    equal(got, 2 * seeded(B))
    lw.vmap(lambda t: seen.append(t["bias"]) or t["w"])({"w": seeded(B), "bias": None})
    assert seen == [None, None]


def test_unmapped_objects_are_the_callers_own():
    log: list[str] = []
    table = {"w": seeded(2), "seen": log}

    class Config:
        scale = 2.0

    config = Config()

    def f(x, given, cfg):
        assert given is table and cfg is config
        given["seen"].append("once")
        return x * given["w"] * cfg.scale

    got = lw.vmap(f, in_dims=(0, None, None))(seeded(B, 2), table, config)
    equal(got, seeded(B, 2) * table["w"] * 2)
    assert log == ["once"]


def test_an_unmapped_part_of_a_mapped_argument_is_the_callers_own():
    log: list[int] = []
    lw.vmap(lambda t: t["log"].append(1) or t["x"], in_dims=({"x": 0, "log": None},))({"x": seeded(B), "log": log})
    assert log == [1]
    empty: list[int] = []
    lw.vmap(lambda x, given: given.append(1) or x)(seeded(B), empty)
    assert empty == [1]


def test_a_write_into_a_mapped_argument_is_seen_by_the_caller():
    x, want = seeded(2, B), seeded(2, B) + 1
    lw.vmap(lambda a: a.add_(1), in_dims=1)(x)
    equal(x, want)


# --- keywords and names ----------------------------------------------------------------------------------------------


def test_keywords_are_not_mapped():
    x, shift = seeded(B, 2), seeded(2, seed=1)
    equal(lw.vmap(lambda x, *, shift, k=2: x * k + shift)(x, shift=shift), 2 * x + shift)


def test_in_dims_by_name():
    x, y, shift = seeded(B, 2), seeded(2, B, seed=1), seeded(2, seed=2)
    f = lambda x, y, *, shift=None: x * y + shift
    want = x * y.T + shift
    equal(lw.vmap(f, in_dims={"x": 0, "y": 1})(x, y, shift=shift), want)
    equal(lw.vmap(f, in_dims={"x": 0, "y": 1})(x, y=y, shift=shift), want)
    equal(lw.vmap(f, in_dims={"x": 0, "y": 1, "shift": 0})(x=x, y=y, shift=shift.expand(B, 2)), want)
    equal(lw.vmap(f, in_dims={"x": None, "shift": {"a": 0}["a"]})(x[0], y[:, 0], shift=x), x[0] * y[:, 0] + x)
    rest = lambda first, *others, scale: first * others[0] * scale
    equal(lw.vmap(rest, in_dims={"others": (0,)})(x[0], x, scale=2.0), x[0] * x * 2)
    equal(lw.vmap(rest, in_dims={"first": 0, "others": None})(x, x[0], scale=2.0), x[0] * x * 2)


def test_axis_size():
    x = seeded(B, 2)
    equal(lw.vmap(lambda: torch.ones(2), axis_size=4)(), torch.ones(4, 2))
    equal(lw.vmap(lambda x: x * 2, in_dims=None, axis_size=2)(x), (2 * x).expand(2, B, 2))
    equal(lw.vmap(lambda x, k: x * k, in_dims=(None, None), axis_size=2)(x, 3), (3 * x).expand(2, B, 2))
    equal(lw.vmap(lambda x: x * 2, axis_size=B)(x), 2 * x)
    drawn = lw.vmap(lambda: torch.rand(2), randomness="different", axis_size=3)()
    assert drawn.shape == (3, 2) and len(set(drawn[:, 0].tolist())) == 3


# --- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_out_dims_place_the_lanes(dim):
    x = seeded(B, 2, 4)
    equal(lw.vmap(lambda a: a * 2, out_dims=dim)(x), (2 * x).movedim(0, dim))
    captured = seeded(2, 4, seed=1)
    equal(lw.vmap(lambda a: captured, out_dims=dim)(x), captured.expand(B, 2, 4).movedim(0, dim))


def test_out_dims_as_a_tree():
    x = seeded(B, 2)
    f = lambda a: {"p": a, "q": (a.sum(), a * 2)}
    got = lw.vmap(f, out_dims={"p": 1, "q": (0, -1)})(x)
    equal(got["p"], x.T)
    equal(got["q"][0], x.sum(1))
    equal(got["q"][1], 2 * x.T)
    equal(lw.vmap(lambda a: a, out_dims=(1,))(x), x.T)
    equal(lw.vmap(lambda a: (a, a), out_dims=[1, 0])(x)[0], x.T)


def test_out_dims_none_gives_the_one_value():
    x, w = seeded(B, 2), seeded(2, seed=1)
    got = lw.vmap(lambda a: (a * w, w * 2, torch.ones(2)), out_dims=(0, None, None))(x)
    equal(got[0], x * w)
    equal(got[1], w * 2)
    equal(got[2], torch.ones(2))
    assert lw.vmap(lambda a: (a, w), out_dims=(0, None))(x)[1] is w


def test_other_values_are_returned_once_as_they_are():
    x = seeded(B, 2)
    note = object()
    got = lw.vmap(lambda a: {"loss": a.sum(), "steps": 3, "tag": "ok", "none": None, "note": note, "pair": (1, a)})(x)
    equal(got["loss"], x.sum(1))
    equal(got["pair"][1], x)
    assert got["steps"] == 3 and got["tag"] == "ok" and got["none"] is None and got["note"] is note


def test_containers_of_results_keep_their_class():
    x = seeded(B, 2)
    got = lw.vmap(lambda a: Batch(a, a.sum(), "name"))(x)
    assert type(got) is Batch and got.name == "name"
    equal(got.label, x.sum(1))
    got = lw.vmap(lambda a: Pair(OrderedDict(w=a), [a]))(x)
    assert type(got) is Pair and type(got.a) is OrderedDict and type(got.b) is list
    assert type(lw.vmap(lambda a: torch.max(a, 0))(x)) is torch.return_types.max


def test_lanes_inside_an_object_are_refused():
    with pytest.raises(ArgumentError, match=r"must only return Tensors, got type .*Normal.*`\.loc` has lanes"):
        lw.vmap(lambda a: torch.distributions.Normal(a, 1.0, validate_args=False))(seeded(B))
    with pytest.raises(ArgumentError, match="must only return Tensors, got type <class 'set'>"):
        lw.vmap(lambda a: {a})(seeded(B))


def test_no_lanes_at_all():
    x = torch.zeros(0, 3)
    assert lw.vmap(lambda a: a.sin())(x).shape == (0, 3)
    assert lw.vmap(lambda a: torch.ones(2), out_dims=1)(x).shape == (2, 0)
    assert lw.vmap(lambda a: (a.sum(), "ok"))(x)[1] == "ok"
    assert lw.vmap(lw.grad(lambda a: (a**2).sum()))(x).shape == (0, 3)


def _asserts(a):
    assert (a > 0).all()
    return a


def _refuses(a):
    if (a < 0).any() or not (a > 0).all():
        raise ValueError("not positive")
    return a


def _must_be(a):
    if a.sum() > 1:
        return a * 2
    raise ValueError("too small")


def _divides(a):
    return a * (math.log(a.sum().item()) + 1 / int(a.sum()))


def _recurs(a):
    def go(b, k):
        return b if k == 0 else go(b * 2, k - 1)

    return go(a, a.sum().int())


def _logs(a):
    torch._assert(bool((a > 0).all()), "not positive")
    return torch.distributions.Gamma(a, a + 1).log_prob(a)


def _waits(a):
    while not (a > 1).all():
        a = a + 1
    return a


def _counts(a):
    n = int(a.sum())
    while n != 1:  # never, from zero
        n = n // 2 if n % 2 == 0 else 3 * n + 1
    return a * n


@pytest.mark.parametrize("f", [_asserts, _refuses, _must_be, _divides, _recurs, _logs, _waits, _counts])
def test_no_lane_fails_a_check(f):
    for _ in range(2):
        assert lw.vmap(f)(torch.zeros(0, 3)).shape == (0, 3)
        assert lw.vmap(f, chunk_size=2)(torch.zeros(0, 3)).shape == (0, 3)
        assert lw.vmap(lw.grad(lambda a: f(a).sum()))(torch.zeros(0, 3)).shape == (0, 3)
        assert lw.vmap(lw.jacfwd(f))(torch.zeros(0, 3)).shape == (0, 3, 3)
        assert lw.vmap(lw.vmap(f))(torch.zeros(2, 0, 3)).shape == (2, 0, 3)
        assert lw.vmap(lw.vmap(f))(torch.zeros(0, 2, 3)).shape == (0, 2, 3)
        lw.vmap(f)(torch.tensor([[1.0, 2.0, 3.0]]))
        lw.vmap(lambda a: f(a) if a[0] < 2 else a)(torch.tensor([[1.0, 2.0, 3.0], [2.0, 2.0, 3.0]]))


def test_an_error_without_lanes_is_that_of_the_first_run():
    def f(a):
        if a.sum() > 0:
            raise ValueError("one")
        raise ValueError("zero")

    with pytest.raises(ValueError, match="zero"):
        lw.vmap(f)(torch.zeros(0, 3))


def test_a_returned_argument_is_an_alias():
    x = seeded(B, 2)
    for got in (lw.vmap(lambda a: a)(x), lw.vmap(lambda a: (a, 1))(x)[0], lw.vmap(lambda a: a, in_dims=-2)(x)):
        assert got is not x and got.equal(x)
        got.requires_grad_()
        assert not x.requires_grad
    parameter = torch.nn.Parameter(x)
    got = lw.vmap(lambda a: a)(parameter)
    assert got.requires_grad and not got.is_leaf


def test_history_goes_through():
    x, w = seeded(B, 2).requires_grad_(), seeded(2, seed=1).requires_grad_()
    got = lw.vmap(lambda a: (a * w).sum())(x)
    want = torch.stack([(a * w).sum() for a in x])
    assert got.requires_grad
    for ours, theirs in zip(torch.autograd.grad(got.sum(), (x, w)), torch.autograd.grad(want.sum(), (x, w))):
        equal(ours, theirs)
    assert not lw.vmap(lambda a: a * 2)(x.detach()).requires_grad
    with torch.no_grad():
        assert not lw.vmap(lambda a: a * w)(x).requires_grad


# --- the wrapped function, and what is left behind -------------------------------------------------------------------


def test_the_function_is_wrapped():
    def loss(x: torch.Tensor, k: int = 2) -> torch.Tensor:
        """Doc."""
        return x * k

    mapped = lw.vmap(loss)
    assert mapped.__name__ == "loss" and mapped.__doc__ == "Doc." and mapped.__wrapped__ is loss
    assert inspect.signature(mapped) == inspect.signature(loss)
    equal(lw.vmap(functools.partial(loss, k=3))(seeded(B)), 3 * seeded(B))
    equal(lw.vmap(torch.nn.Tanh())(seeded(B)), seeded(B).tanh())


def test_signatures_are_those_of_torch():
    for name in ("vmap", "grad", "grad_and_value", "vjp", "jvp", "jacrev", "jacfwd", "hessian"):
        ours = inspect.signature(getattr(lw, name)).parameters
        theirs = inspect.signature(getattr(torch.func, name)).parameters
        for parameter, wanted in theirs.items():
            assert ours[parameter].default == wanted.default, (name, parameter)
            assert ours[parameter].kind == wanted.kind, (name, parameter)
        positional = [p for p in theirs if theirs[p].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        assert list(ours)[: len(positional)] == positional, name


@pytest.mark.parametrize("stop", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing_behind(stop):
    def bad(x):
        x.sin()
        torch.set_grad_enabled(True)
        raise stop

    for transform in (
        lw.vmap(bad),
        lw.vmap(lw.grad(bad)),
        lw.jacfwd(lw.jacrev(bad)),
        lw.hessian(bad),
        lw.vmap(lw.vmap(lw.jacrev(bad))),
        lw.vmap(bad, chunk_size=1),
        lw.vmap(bad, chunk_size="auto"),
    ):
        with torch.no_grad():
            before = torch.is_grad_enabled()
            with pytest.raises(stop):
                transform(seeded(2, 2, 2))
            if transform.__wrapped__ is not bad:
                assert torch.is_grad_enabled() is before
        assert not live_levels()
    equal(lw.vmap(lw.grad(lambda t: t.sin().sum()))(seeded(B, 2)), seeded(B, 2).cos())


def test_an_escaped_tensor_is_told():
    kept = []
    lw.vmap(lambda x: kept.append(x) or x)(seeded(B))
    with pytest.raises(EscapedTensorError, match="your tensor may have escaped"):
        kept[0].add(1)


def test_debug_unwrap():
    seen = []

    def f(x):
        seen.extend([lw.debug_unwrap(x), lw.debug_unwrap(x, recurse=False)])
        return x

    x = seeded(2, B, 4)
    lw.vmap(lw.vmap(f))(x)
    assert seen[0] is x or seen[0].data_ptr() == x.data_ptr()
    assert seen[0].shape == (2, B, 4) and seen[1].shape == (B, 4) and type(seen[1]) is not torch.Tensor
    assert lw.debug_unwrap(x) is x


class Image(torch.Tensor):
    """A subclass without anything of its own, as libraries have."""


class Noted(torch.Tensor):
    """A subclass that looks on."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


SUBCLASSED = {
    "captured": lambda x, w: (w * x).cumsum(0),
    "captured, in a branch": lambda x, w: (w * x).sin() if x[0] > 0 else w + x,
    "captured, written from": lambda x, w: torch.zeros(3, dtype=x.dtype).index_add(0, torch.tensor([2, 0, 1]), w * x),
    "detached": lambda x, w: w.detach() * x,
    "matrix product": lambda x, w: w @ x * x,
}
OF_SUBCLASSES = {
    "vmap": lambda f: lw.vmap(f),
    "vmap(grad)": lambda f: lw.vmap(lw.grad(lambda x: f(x).sum())),
    "grad(vmap)": lambda f: lw.grad(lambda xs: lw.vmap(f)(xs).sum()),
    "vmap(jvp)": lambda f: lw.vmap(lambda x: lw.jvp(f, (x,), (x,))[1]),
    "vmap(vmap)": lambda f: lambda xs: lw.vmap(lw.vmap(f))(xs[None])[0],
}


@pytest.mark.parametrize("transform", OF_SUBCLASSES.values(), ids=OF_SUBCLASSES)
@pytest.mark.parametrize("kind", [Image, Noted, torch.nn.Parameter])
@pytest.mark.parametrize("f", SUBCLASSED.values(), ids=SUBCLASSED)
def test_captured_tensors_of_subclasses(f, kind, transform):
    xs = torch.tensor([[1.0, -2.0, 0.5], [-1.0, 3.0, 2.0]], dtype=torch.float64)
    w = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    own = torch.nn.Parameter(w) if kind is torch.nn.Parameter else w.as_subclass(kind)
    got = transform(lambda x: f(x, own))(xs)
    want = transform(lambda x: f(x, w))(xs)
    torch.testing.assert_close(got.detach().as_subclass(torch.Tensor), want.detach())


# --- dicts of tensors, the commonest containers ----------------------------------------------------------------------


def state(*, front: bool = True) -> dict[str, torch.Tensor]:
    made = {"w": seeded(B, 2, 4), "b": seeded(B, 4, seed=1)}
    return made if front else {name: value.movedim(0, 1) for name, value in made.items()}


def apply(p, x):
    return (x @ p["w"] + p["b"]).sin()


@pytest.mark.parametrize("shape", [0, (0, 0), (0, None), (1, 0), (1, None), (-2, 1), ({"w": 0, "b": 0}, 0)])
def test_a_dict_of_tensors_is_mapped_as_each_of_them(shape):
    own, other = shape if isinstance(shape, tuple) else (shape, shape)
    p = {"w": seeded(B, 2, 4), "b": seeded(B, 4, seed=1)}
    dim = own if isinstance(own, int) else 0
    x = seeded(B, 2, seed=2)
    want = torch.stack(
        [apply({name: v[i] for name, v in p.items()}, x[0] if other is None else x[i]) for i in range(B)]
    )
    given = {name: v.movedim(0, dim) for name, v in p.items()}
    equal(lw.vmap(apply, in_dims=shape)(given, x[0] if other is None else x.movedim(0, other)), want)
    gradients = lw.vmap(lw.grad(lambda p, x: apply(p, x).sum()), in_dims=shape)(
        given, x[0] if other is None else x.movedim(0, other)
    )
    assert list(gradients) == ["w", "b"]
    for name, v in p.items():
        leaf = v.clone().requires_grad_()
        rows = [
            apply({**{n: t[i] for n, t in p.items()}, name: leaf[i]}, x[0] if other is None else x[i]) for i in range(B)
        ]
        equal(gradients[name], torch.autograd.grad(torch.stack(rows).sum(), leaf)[0])


def test_a_dict_takes_the_short_way(monkeypatch):
    monkeypatch.setattr(vmap_module, "run_lanes", None)
    p = {"w": seeded(B, 2, 4), "b": seeded(B, 4, seed=1)}
    lw.vmap(apply)(p, seeded(B, 2))
    lw.vmap(apply, in_dims=(0, None))(p, seeded(2))
    lw.vmap(lambda p: p["w"].sum(), in_dims=(1,))({"w": seeded(2, B)})


def test_a_dict_comes_as_a_new_one_and_its_tensors_as_aliases():
    p = {"w": seeded(B, 2)}

    def f(p, x):
        p["new"] = x
        p["w"] = p["w"] + x
        return p["w"]

    equal(lw.vmap(f)(p, seeded(B, 2)), p["w"] + seeded(B, 2))
    assert list(p) == ["w"] and torch.equal(p["w"], seeded(B, 2))
    same = lw.vmap(lambda p: p["w"])(p)
    assert same is not p["w"] and torch.equal(same, p["w"])
    both = lw.vmap(lambda p: p)(p)
    assert both is not p and both["w"] is not p["w"] and torch.equal(both["w"], p["w"])
    lw.vmap(lambda p: p["w"].mul_(2).sum())(p)
    equal(p["w"], seeded(B, 2) * 2)


def test_an_empty_dict_is_the_one_that_was_given():
    notes: dict = {}

    def f(notes, x):
        notes["seen"] = 1
        return x

    lw.vmap(f)(notes, seeded(B))
    assert notes == {"seen": 1}


def test_what_was_written_into_tensors_of_a_dict_before_lanes_part_is_written_once():
    def f(p, x):
        p["w"].add_(1)
        return p["w"] * 2 if x > 0 else p["w"]

    p, x = {"w": seeded(B, 2)}, torch.tensor([1.0, -1.0, 2.0])
    for _ in range(3):
        before = {"w": p["w"].clone()}
        want = torch.stack([f({"w": before["w"][i]}, x[i]) for i in range(B)])
        equal(lw.vmap(f)(p, x), want)
        equal(p["w"], before["w"])


@pytest.mark.parametrize(
    "given, phrase",
    [
        ({"w": seeded(B, 2), "b": seeded(B + 1)}, "Expected all tensors to have the same size in the mapped dimension"),
        ({"w": seeded(B, 2), "b": torch.tensor(1.0)}, "p['b']"),
        ({"w": seeded(B, 2), "b": 3}, "p['b']"),
        ({"w": seeded(B, 2), "b": "text"}, "p['b']"),
    ],
)
def test_a_dict_that_does_not_fit_is_named(given, phrase):
    for in_dims in (0, (0,)):
        with pytest.raises(ValueError) as caught:
            lw.vmap(lambda p: p["w"], in_dims=in_dims)(given)
        assert phrase in str(caught.value)


def test_dicts_with_other_things_in_them():
    nested = {"a": {"w": seeded(B, 2)}, "n": None, "list": [seeded(B)]}
    out = lw.vmap(lambda t: t["a"]["w"].sum() + t["list"][0] if t["n"] is None else None)(nested)
    equal(out, nested["a"]["w"].sum(1) + nested["list"][0])


def test_a_generator_is_no_result():
    def items(x):
        yield x * 2

    with pytest.raises(lw.errors.ArgumentError, match=r"must only return Tensors, got type <class 'generator'>"):
        lw.vmap(items)(torch.ones(3))
    assert lw.vmap(lambda x: sum(items(x)))(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
