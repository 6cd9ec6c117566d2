"""Functions that write no values of lanes to what is the same in all: that stays plain tensors, until one does."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import lanewise
from lanewise import grad, jacfwd, jvp, vjp, vmap
from lanewise._core.batch import BatchTensor
from lanewise._core.level import live_levels
from lanewise._core.short.shared import _without, with_wrappers
from lanewise._torch_compat import OUTSIDE_KEY, tls_is_excluded, tls_is_included


@pytest.fixture(autouse=True)
def _unknown() -> None:
    for known in (with_wrappers, *_without.values()):
        known.clear()


def table() -> Tensor:
    """[3], by ten operations on what is made inside."""
    t = torch.arange(3.0, dtype=torch.float64)
    for _ in range(4):
        t = (t * 0.9) + 0.1
    return t.sin()


def stays_plain(f: Callable, *args: Any) -> bool:
    """Whether what is made inside is a plain tensor in the next call."""
    kinds = []

    def look(*args: Any) -> Any:
        kinds.append(type(table()))
        return f(*args)

    mapped = vmap(look)
    mapped(*args)
    mapped(*args)
    assert kinds[0] is BatchTensor
    return kinds[-1] is Tensor


def rows(*args: Tensor) -> list[tuple]:
    return [tuple(each.clone() for each in row) for row in zip(*args)]


X = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.7, -1.1], [2.0, 0.1, 0.2], [-0.4, 1.3, 0.9]], dtype=torch.float64)
W = torch.tensor([0.5, -1.5, 2.0], dtype=torch.float64)
LEAF = torch.tensor([0.3, 0.1, -0.2], dtype=torch.float64, requires_grad=True)
PLACES = torch.tensor([0, 2, 1, 2])


def test_what_is_the_same_in_all_lanes_stays_plain() -> None:
    assert stays_plain(lambda x: x * table() + table() @ W, X)
    assert stays_plain(lambda x: table() @ W, X)
    assert stays_plain(lambda x, i: x.sum() * table(), X, PLACES)


def test_tensors_written_without_lanes_stay_plain() -> None:
    def f(x: Tensor) -> Tensor:
        t = table()
        t[0] = 5.0
        t[1:].mul_(2)
        t += W
        return x * t

    assert stays_plain(f, X)
    torch.testing.assert_close(vmap(f)(X), torch.stack([f(x) for x in X]))


# --- what a plain tensor cannot stand for ----------------------------------------------------------------------------


def _out(x: Tensor, t: Tensor) -> Tensor:
    torch.add(x, 1, out=t)
    return t


def _alias(make: Callable) -> Callable:
    """A write to what shares the memory of the table, which is to show in the table."""

    def f(x: Tensor, t: Tensor) -> Tensor:
        make(x, t).mul_(x)
        return t + x

    return f


def _data(x: Tensor, t: Tensor) -> Tensor:
    t.data = x * 2
    return t + 1


def _put_into(x: Tensor, t: Tensor) -> Tensor:
    t[1] = x.sum()
    return t


def _picked(x: Tensor, t: Tensor) -> Tensor:
    i = (x > 0).sum() % 3
    row = t[i]
    t.add_(1)
    return row + t.sum()


def _statistics(x: Tensor, t: Tensor) -> Tensor:
    var = t * 0 + 1
    out = F.batch_norm(torch.stack([x, x * 2, x + 1]), t, var, training=True)
    return out.sum(0) + t + var


def _instance(x: Tensor, t: Tensor) -> Tensor:
    var = t * 0 + 1
    out = F.instance_norm(torch.stack([x, x * 2, x + 1])[None], t, var, use_input_stats=True)
    return out.sum(-1)[0] + t + var


def _leaf(x: Tensor, t: Tensor) -> Tensor:
    t.requires_grad_()
    return torch.autograd.grad((x * t).square().sum(), t)[0]


def _made_leaf(x: Tensor, t: Tensor) -> Tensor:
    leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (x * leaf * t).square().sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def _parameter(x: Tensor, t: Tensor) -> Tensor:
    leaf = nn.Parameter(t.clone())
    seen = []
    leaf.register_hook(lambda g: seen.append(g * 2))
    (x * leaf).square().sum().backward()
    return seen[0]


def _nested(x: Tensor, t: Tensor) -> Tensor:
    def g(row: Tensor) -> Tensor:
        t.add_(row)
        return t.clone()

    return vmap(lambda y: x * y + t)(torch.stack([x, t])).sum(0)


def _caught(x: Tensor, t: Tensor) -> Tensor:
    try:
        t.add_(x)
    except RuntimeError:
        return t * 0
    return t


def _caught_all(x: Tensor, t: Tensor) -> Tensor:
    try:
        t.add_(x)
    except:  # noqa: E722
        return t * 0
    return t


def _copied(x: Tensor, t: Tensor) -> Tensor:
    twin = copy.deepcopy(t)
    twin.add_(x)
    return twin + t


def _dual(x: Tensor, t: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(forward_ad.make_dual(t, x).sin()).tangent
        assert tangent is not None
        return tangent + t


def _branch(x: Tensor, t: Tensor) -> Tensor:
    if x.sum() > 0:
        t = t + 1
    return t * x


def _own_grad(x: Tensor, t: Tensor) -> Tensor:
    t.grad = x * 2
    return t.grad + t


def _hook(x: Tensor, t: Tensor) -> Tensor:
    u = LEAF * t
    u.register_hook(lambda g: g.clamp(-0.5, 0.5))  # of each lane
    return u * x


HAZARDS = {
    "add_": lambda x, t: t.add_(x),
    "+=": lambda x, t: t.__iadd__(x),
    "[1] =": _put_into,
    "[:] =": lambda x, t: (t.__setitem__(slice(None), x), t)[1],
    "[mask] =": lambda x, t: (t.__setitem__(x > 0, 7.0), t)[1],
    "view": lambda x, t: (t.view(-1)[1:].add_(x[1:]), t)[1],
    "out": _out,
    "copy_": lambda x, t: t.copy_(x),
    "index_put_": lambda x, t: t.index_put_((torch.tensor([1]),), x[:1]),
    "masked_fill_": lambda x, t: t.masked_fill_(x > 0, 2.0),
    "foreach": lambda x, t: (torch._foreach_add_([t], [x]), t)[1],
    "zero size": lambda x, t: t.resize_as_(x).mul_(x),
    "view_as": _alias(lambda x, t: t.view_as(x)),
    "expand_as": _alias(lambda x, t: t.expand_as(x)),
    "to": _alias(lambda x, t: t.to(x)),
    "type_as": _alias(lambda x, t: t.type_as(x)),
    "reshape_as": _alias(lambda x, t: t.reshape_as(x)),
    "broadcast": _alias(lambda x, t: torch.broadcast_tensors(t, x)[0]),
    "detach": _alias(lambda x, t: t.detach()),
    "data of": _alias(lambda x, t: t.data),
    "atleast": _alias(lambda x, t: torch.atleast_2d(t, x)[0][0]),
    "data": _data,
    "x.copy_": lambda x, t: x.copy_(t) + t,
    "x +=": lambda x, t: x.add_(t),
    "picked": lambda x, t: t[(x > 0).sum() % 3] * x,
    "picked, written": _picked,
    "statistics": _statistics,
    "instance norm": _instance,
    "leaf": _leaf,
    "made a leaf": _made_leaf,
    "parameter": _parameter,
    "grad": lambda x, t: grad(lambda t: (x * t).square().sum())(t),
    "grad of x": lambda x, t: grad(lambda x: (x * t).square().sum())(x),
    "vjp": lambda x, t: vjp(lambda t: t * x, t)[1](x)[0],
    "jvp": lambda x, t: jvp(lambda t: t.sin() * x, (t,), (x,))[1],
    "jacfwd": lambda x, t: jacfwd(lambda t: t.sin() * x)(t).sum(0),
    "vmap": _nested,
    "caught": _caught,
    "all caught": _caught_all,
    "deepcopy": _copied,
    "dual": _dual,
    "branch": _branch,
    "grad attribute": _own_grad,
    "recorded into x": lambda x, t: x.add_(LEAF * t),
    "recorded": lambda x, t: LEAF * t * x,
    "composition": lambda x, t: F.cosine_similarity(x, LEAF, 0) + x,
    "hook": _hook,
    "new_tensor": lambda x, t: t.new_zeros(3).add_(x) + t,
    "zeros_like": lambda x, t: torch.zeros_like(t).add_(x) + t,
    "empty_like": lambda x, t: torch.empty_like(t).copy_(x) + t,
    "tensor": lambda x, t: torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).add_(x) + t,
}


@pytest.mark.parametrize("name", HAZARDS)
@pytest.mark.parametrize("known", [True, False])
def test_what_plain_tensors_cannot_stand_for_starts_again(name: str, known: bool) -> None:
    hazard = HAZARDS[name]
    at = {"hazard": False}
    runs: list[int] = []

    def f(x: Tensor) -> Tensor:
        t = table()
        runs.append(1)
        return hazard(x, t) if at["hazard"] else x * t

    mapped = vmap(f)
    if known:
        plain = x_times_table()
        for _ in range(3):
            torch.testing.assert_close(mapped(X), plain)
        assert _without[True] and not with_wrappers
    at["hazard"] = True
    want = torch.stack([f(*row) for row in rows(X)])
    for _ in range(3):
        got = mapped(X.clone())
        assert got.dtype is want.dtype and got.requires_grad == want.requires_grad
        torch.testing.assert_close(got, want)
        if want.requires_grad:
            (gradient,) = torch.autograd.grad(got.square().sum(), LEAF)
            torch.testing.assert_close(gradient, torch.autograd.grad(want.square().sum(), LEAF, retain_graph=True)[0])
    assert not live_levels() and not tls_is_excluded(OUTSIDE_KEY) and not tls_is_included(OUTSIDE_KEY)


def x_times_table() -> Tensor:
    return torch.stack([x * table() for x in X])


RANDOM = {
    "bernoulli": lambda t: torch.bernoulli(t.abs().clamp(0, 1)),
    "normal_": lambda t: t.normal_(),
    "uniform_": lambda t: t[1:].uniform_(),
    "rand_like": torch.rand_like,
    "dropout": lambda t: F.dropout(t),
    "dropout_": lambda t: F.dropout(t, inplace=True),
    "randn": lambda t: torch.randn(3) + t,
    "randn out": lambda t: torch.randn(3, out=t, dtype=t.dtype),
    "rand out": lambda t: torch.rand(3, out=t, dtype=t.dtype),
    "normal out": lambda t: torch.normal(t, t.abs() + 1, out=t),
    "bernoulli out": lambda t: torch.bernoulli(t.abs().clamp(0, 1), out=t),
    "randperm out": lambda t: torch.randperm(3, out=torch.zeros(3, dtype=torch.int64)) + t,
    "multinomial": lambda t: torch.multinomial(t.abs() + 1, 1) + t,
    "multinomial out": lambda t: torch.multinomial(t.abs() + 1, 1, out=torch.zeros(1, dtype=torch.int64)) + t,
    "poisson": lambda t: torch.poisson(t.abs()),
    "init": lambda t: nn.init.xavier_normal_(t.repeat(3, 1)),
    "rrelu": lambda t: F.rrelu(t - 1, training=True),
    "gamma": lambda t: torch._standard_gamma(t.abs() + 1),
    "lstm": lambda t: nn.LSTM(3, 3, 2, dropout=0.5).double().requires_grad_(False)(t.repeat(2, 1))[0],
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_refused_as_at_first(name: str) -> None:
    at = {"draw": False}

    def f(x: Tensor) -> Tensor:
        t = table()
        return RANDOM[name](t).sum() + x if at["draw"] else x * t

    mapped = vmap(f)
    for _ in range(2):
        mapped(X)
    at["draw"] = True
    with pytest.raises(RuntimeError, match="random"):
        mapped(X)


def test_captured_tensors_that_are_recorded_in_some_calls_only() -> None:
    def f(x: Tensor) -> Tensor:
        return x * table() * leaf

    leaf = LEAF.detach().clone()
    mapped = vmap(f)
    for _ in range(2):
        assert not mapped(X).requires_grad
    leaf.requires_grad_()
    with torch.no_grad():
        assert not mapped(X).requires_grad
    sum(f(x).sum() for x in X).backward()
    want = leaf.grad
    for _ in range(2):
        leaf.grad = None
        mapped(X).sum().backward()
        torch.testing.assert_close(leaf.grad, want)


@pytest.mark.parametrize("kind", [nn.InstanceNorm1d, nn.BatchNorm1d])
def test_running_statistics_that_are_updated_in_some_calls_only(kind: Any) -> None:
    norm = kind(3, affine=False, track_running_stats=True).double().eval()
    twin = copy.deepcopy(norm)

    def f(x: Tensor, norm: nn.Module = norm) -> Tensor:
        t = table()
        return norm(torch.stack([x * t, x * 2, x + 1], -1)[None])

    mapped = vmap(f)
    for _ in range(2):
        mapped(X)
    norm.train()
    twin.train()
    for _ in range(2):
        torch.testing.assert_close(mapped(X), torch.stack([f(x, twin) for x in X]))
        torch.testing.assert_close(norm.running_mean, twin.running_mean)
        torch.testing.assert_close(norm.running_var, twin.running_var)


def test_a_backward_pass_inside_adds_to_leaves_once_for_each_lane() -> None:
    leaf, at = W.clone().requires_grad_(), {"backward": False}

    def f(x: Tensor) -> Tensor:
        t = table()
        if at["backward"]:
            (leaf * t).sum().backward()
        return x * t

    mapped = vmap(f)
    for _ in range(2):
        mapped(X)
    at["backward"] = True
    for x in X:
        f(x)
    want, leaf.grad = leaf.grad, None
    mapped(X)
    torch.testing.assert_close(leaf.grad, want)


def test_what_was_done_before_is_done_once() -> None:
    at, seen, count = {"write": False}, [], torch.zeros(())

    def f(x: Tensor) -> Tensor:
        seen.append(1)
        count.add_(1)
        t = table()
        return t.add_(x) if at["write"] else t * x

    mapped = vmap(f)
    for _ in range(2):
        mapped(X)
    before = len(seen), int(count)
    at["write"] = True
    mapped(X)
    assert (len(seen), int(count)) == (before[0] + 1, before[1] + 1)


def test_errors_of_the_function_are_its_own() -> None:
    at = {"fail": False}

    def f(x: Tensor) -> Tensor:
        t = table()
        if at["fail"]:
            raise KeyError("mine")
        return x * t

    mapped = vmap(f)
    for _ in range(2):
        mapped(X)
    at["fail"] = True
    with pytest.raises(KeyError, match="mine"):
        mapped(X)
    at["fail"] = False
    torch.testing.assert_close(mapped(X), x_times_table())
    assert not live_levels() and not tls_is_excluded(OUTSIDE_KEY)


def test_inside_other_transforms() -> None:
    def f(x: Tensor) -> Tensor:
        t = table()
        return (x * t + t @ W).sin()

    mapped = vmap(f)
    for _ in range(3):
        want = torch.stack([f(x) for x in X])
        torch.testing.assert_close(mapped(X), want)
        torch.testing.assert_close(vmap(mapped)(X[None].repeat(2, 1, 1)), want.repeat(2, 1, 1))
        leaf = X.clone().requires_grad_()
        torch.stack([f(x) for x in leaf]).sum().backward()
        torch.testing.assert_close(grad(lambda x: mapped(x).sum())(X), leaf.grad)
        tangent = jvp(mapped, (X,), (torch.ones_like(X),))[1]
        torch.testing.assert_close(tangent, leaf.grad)
        with torch.inference_mode():
            torch.testing.assert_close(mapped(X), want)


def test_results_without_lanes() -> None:
    def f(x: Tensor) -> Any:
        t = table()
        return x * t, t, t[1:], float(t.sum()), t > 0

    mapped = vmap(f)
    first = mapped(X)
    for _ in range(2):
        again = mapped(X)
        for a, b in zip(first, again):
            assert type(a) is type(b)
            torch.testing.assert_close(a, b)
    assert again[1].shape == (4, 3) and again[1].stride() == first[1].stride()


def test_what_is_shared_passes_no_code_of_the_library() -> None:
    library = str(Path(lanewise.__file__).parent)

    def calls_of_library(operation: Callable) -> list[int]:
        captured, count, often = torch.eye(3), 0, 12

        def f(x: Tensor) -> Tensor:
            y = captured
            for _ in range(often):
                y = operation(y)
            kept = y
            del kept  # what does more than compute takes a plane
            return x + y.sum()

        def note(frame: Any, event: str, _: Any) -> None:
            nonlocal count
            count += event == "call" and frame.f_code.co_filename.startswith(library)

        mapped, counts = vmap(f), []
        for _ in range(3):  # at the third, its source is read
            mapped(torch.arange(2.0))
        for often in (1, 11):  # noqa: B007 (`f` reads it)
            count = 0
            sys.setprofile(note)
            try:
                mapped(torch.arange(2.0))
            finally:
                sys.setprofile(None)
            counts.append(count)
        return counts

    for operation in (
        lambda y: y @ y,
        lambda y: torch.linalg.solve(y, y),
        lambda y: y.sin() + 1,
        lambda y: y.t()[:2].T,
    ):
        few, many = calls_of_library(operation)
        assert few == many
