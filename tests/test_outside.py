"""Tensors computed inside a function from outside tensors alone: they take lane values, and their history stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from lanewise import grad, jvp, vjp, vmap
from lanewise._core.level import live_levels
from tests.oracles import SECOND, assert_same, difference, loop_vmap

XS = (torch.arange(12.0, dtype=torch.float64) * 0.7).sin().reshape(4, 3) + 0.1
YS = (torch.arange(6.0, dtype=torch.float64) * 1.3).cos().reshape(2, 3) + 0.2
W = torch.tensor([0.9, -0.4, 1.3], dtype=torch.float64)

torch.manual_seed(0)
CELL = nn.GRUCell(3, 3, dtype=torch.float64)


def add_lane(x, w):
    y = w * 1.0
    y.add_(x)
    return y * w


def multiply_by_factory(x, w):
    y = w * 1.0
    y.mul_(torch.ones(3, dtype=w.dtype) * 2)
    return y * x


def clone_then_write(x, w):
    y = w.clone()
    y[0] = x[1] * w[2]
    return y.sin() * x


def write_through_view(x, w):
    y = w.sin()
    row = y[1:]
    row.mul_(x[:2])
    return y * row.sum()


def view_seen_after_write(x, w):
    y = w + w.exp()
    first = y.view(3, 1)[0]
    y.mul_(x)
    return first * w


def accumulate(x, w):
    total = w.square()
    for k in range(3):
        total[k] += x[k] * total.sum()
    return total


def vander(x, w):
    columns = torch.linalg.vander(w, N=3)
    columns[1] = x
    return columns @ w


def write_index(x, w):
    y = w * w
    y.index_add_(0, torch.tensor([2, 0]), x[:2])
    return y.cumsum(0)


def scattered(x, w):
    return (2 * w).scatter_(0, torch.tensor([1]), x[:1]).prod() * w


def cell(x, w):
    return CELL(x, w)


def concatenated(x, w):
    y = torch.cat([w, w.flip(0)])
    y[:3] -= x
    return y.view(2, 3).logsumexp(0)


def of_several_results(x, w):
    values, _ = w.sort()
    values[0] *= x[0]
    return values * x


def smoothed(x, w):
    return functional.cross_entropy(w, x.abs().softmax(0), label_smoothing=0.2) * x


PROGRAMS = [
    add_lane,
    multiply_by_factory,
    clone_then_write,
    write_through_view,
    view_seen_after_write,
    accumulate,
    vander,
    write_index,
    scattered,
    cell,
    concatenated,
    of_several_results,
    smoothed,
]
by_program = pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)


def leaves():
    return XS.clone().requires_grad_(), W.clone().requires_grad_()


def outer_gradients(run):
    xs, w = leaves()
    out = run(xs, w)
    return out.detach(), *torch.autograd.grad(out.cos().sum(), (xs, w))


@by_program
def test_value_and_backward_from_outside(f):
    got = outer_gradients(lambda xs, w: vmap(lambda x: f(x, w))(xs))
    assert_same(got, outer_gradients(lambda xs, w: loop_vmap(lambda x: f(x, w))(xs)))


def plain_gradient(f, position):
    """The gradient of the sum by torch.autograd, which can be differentiated again."""

    def gradient(x, w):
        with torch.enable_grad():
            args = [a.view_as(a) if a.requires_grad else a.detach().requires_grad_() for a in (x, w)]
            return torch.autograd.grad(f(*args).sin().sum(), args[position], create_graph=True)[0]

    return gradient


@by_program
@pytest.mark.parametrize("position", [0, 1])
def test_vmap_of_grad(f, position):
    gradient = grad(lambda x, w: f(x, w).sin().sum(), argnums=position)
    got = outer_gradients(lambda xs, w: vmap(lambda x: gradient(x, w))(xs))
    want = outer_gradients(lambda xs, w: loop_vmap(lambda x: plain_gradient(f, position)(x, w))(xs))
    assert_same(got, want)


@by_program
def test_grad_of_vmap(f):
    got = grad(lambda w: vmap(lambda x: f(x, w))(XS).sin().sum())(W)
    w = W.clone().requires_grad_()
    (want,) = torch.autograd.grad(loop_vmap(lambda x: f(x, w))(XS).sin().sum(), w)
    assert_same(got, want)


@by_program
def test_tangents(f):
    direction = W.flip(0)
    want = difference(lambda w: loop_vmap(lambda x: f(x, w))(XS), (W,), (direction,))[0]
    _, around = jvp(lambda w: vmap(lambda x: f(x, w))(XS), (W,), (direction,))
    assert_same(around, want.detach(), SECOND)
    inside = vmap(lambda x: jvp(lambda w: f(x, w), (W,), (direction,))[1])(XS)
    assert_same(inside, want.detach(), SECOND)


@by_program
def test_outer_lanes_alone(f):
    """What an inner vmap computes from lanes of the outer one takes its own lanes, and the other way round."""

    def program(run):
        def nested(xs, w):
            return run(lambda x: run(lambda y: f(y, x) * f(y, w) + f(x, y))(YS))(xs)

        return nested

    assert_same(outer_gradients(program(vmap)), outer_gradients(program(loop_vmap)))


def test_torch_code_that_writes_into_what_it_makes():
    """Values only: torch's own vander cannot be differentiated."""
    f = lambda x: torch.vander(x, 4) + torch.vander(W, 4, increasing=True) * torch.kaiser_window(4, dtype=x.dtype)
    assert_same(vmap(f)(XS), loop_vmap(f)(XS))
    for integers in (torch.arange(3), torch.arange(3, dtype=torch.int32)):
        g = lambda x, integers=integers: torch.vander(integers) * x
        assert_same(vmap(g)(XS), loop_vmap(g)(XS))
    with pytest.raises(RuntimeError, match="vander: x must be a one-dimensional tensor, got"):
        vmap(lambda x: torch.vander(x[None]))(XS)


def test_vjp_of_vmap():
    _, pull = vjp(lambda w: vmap(lambda x: accumulate(x, w))(XS), W)
    w = W.clone().requires_grad_()
    out = loop_vmap(lambda x: accumulate(x, w))(XS)
    assert_same(pull(torch.ones_like(out))[0], torch.autograd.grad(out.sum(), w)[0])


def test_a_write_to_the_outside_tensor_itself_is_refused():
    w = torch.zeros(3, dtype=torch.float64)
    for write in (
        lambda x: w.add_(x),
        lambda x: w.contiguous().add_(x),
        lambda x: w.view(3, 1)[0].copy_(x[0]),
        lambda x: torch.mul(x, 2, out=w),
    ):
        with pytest.raises(RuntimeError, match="inplace arithmetic"):
            vmap(write)(XS)
    assert_same(w, torch.zeros(3, dtype=torch.float64))


def test_writes_of_outside_values_reach_the_outside_tensor_once():
    w, other = torch.zeros(3, dtype=torch.float64), W.clone()
    vmap(lambda x: (w.add_(other * 2), torch.sub(w, 1, out=w), x)[2])(XS)
    assert_same(w, W * 2 - 1)


def test_a_loss_of_outside_tensors_counts_once_per_lane():
    """As in a loop: `.backward()` inside adds to the leaf for each lane."""
    w = W.clone().requires_grad_()

    def f(x):
        (w * w).sum().backward()
        return x

    vmap(f)(XS)
    assert_same(w.grad, 2 * W * len(XS))


def test_a_graph_from_outside_is_differentiated_outside():
    w = W.clone().requires_grad_()
    loss = (w**3).sum()

    def f(x):
        (gradient,) = torch.autograd.grad(loss, w, retain_graph=True)
        return gradient * x

    assert_same(vmap(f)(XS), XS * 3 * W**2)
    vmap(lambda x: (loss.backward(retain_graph=True), x)[1])(XS)
    assert_same(w.grad, 3 * W**2)


def test_numbers_of_outside_tensors():
    """What is the same in all lanes answers as a plain tensor does."""
    f = lambda x: x * float((W * 2).sum()) if bool((W > 0).any()) else x
    assert_same(vmap(f)(XS), XS * float((W * 2).sum()))
    assert not live_levels()


def test_parts_of_an_outside_conjugate():
    zs = torch.complex(XS, XS.flip(0))
    c = torch.complex(W, W.flip(0)).conj()
    for part in (lambda d: d.real, lambda d: d.imag, lambda d: d.conj().imag, lambda d: d.real * d.resolve_conj().imag):
        f = lambda z, d, part=part: (part(d) * z.abs()).square().sum()
        got = vmap(grad(f, argnums=1), in_dims=(0, None))(zs, c)
        assert_same(got, torch.stack([grad(f, argnums=1)(z, c) for z in zs]))
    for alone in (
        lambda z: (c * 1).imag,
        lambda z: c.sin(),
        lambda z: torch.stack(torch.unbind(c + c)),
        lambda z: c @ z,
    ):
        assert_same(vmap(alone)(zs), torch.stack([alone(z) for z in zs]))
    largest = lambda z: torch.linalg.svd(c.outer(c.conj()))[1] * z.abs() + torch.linalg.slogdet(c.outer(c) + 2)[1]
    assert_same(vmap(largest)(zs), torch.stack([largest(z) for z in zs]))


class Remembers(nn.Module):
    """Keeps what it computes from its own tensors, as caches and counters do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(W.clone())
        self.count = torch.zeros((), dtype=torch.float64)
        self.cache: tuple = ()

    def forward(self, x):
        self.count = self.count + 1
        if not self.cache:
            self.cache = (self.weight.exp(), torch.arange(3.0, dtype=torch.float64) * 2)
        scale, steps = self.cache
        return (x * scale + steps[1:].sum()) * steps


def test_what_is_kept_is_used_again():
    module, plain = Remembers(), Remembers()
    want = loop_vmap(plain)(XS)
    results = [vmap(module)(XS), vmap(module)(XS), loop_vmap(module)(XS)]
    for out in results:
        module.weight.grad = None
        assert_same(out, want)
        assert_same(
            torch.autograd.grad(out.cos().sum(), module.weight, retain_graph=True),
            torch.autograd.grad(want.cos().sum(), plain.weight, retain_graph=True),
        )
    assert float(module.count) == 2 + len(XS)
    scale, steps = module.cache
    assert (steps + 1).tolist() == [1, 3, 5] and steps.numpy().sum() == 6
    assert_same(scale[1] * 1, W[1].exp())
    assert_same(vmap(lambda s: s * 2)(scale.unsqueeze(0))[0], W.exp() * 2)
    steps += 1
    assert (steps * 1).tolist() == [1, 3, 5]


def test_what_is_kept_of_a_jvp_is_used_again():
    module = Remembers()
    _, tangent = jvp(module, (XS[0],), (XS[1],))
    assert_same(module(XS[0]), loop_vmap(Remembers())(XS)[0])
    _, again = jvp(module, (XS[0],), (XS[1],))
    assert_same(again, tangent)


def test_what_has_lanes_must_not_be_kept():
    kept = []
    vmap(lambda x: kept.append((x * 2, (W * 1).add_(x))) or x)(XS)
    for tensor in kept[0]:
        with pytest.raises(RuntimeError, match="may have escaped"):
            _ = tensor + 1
        with pytest.raises(RuntimeError, match="may have escaped"):
            tensor.numpy()
