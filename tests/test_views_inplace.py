"""Views and in-place writes under the transforms: what a loop over lanes would do, derivatives included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lanewise import grad, jvp, vjp, vmap
from tests.oracles import SECOND, assert_same, autograd_grad, difference, loop_vmap, loss

pytestmark = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")


def _in_place_chain(x):
    y = x.clone()
    y.add_(1).mul_(x).sub_(0.5).sin_()
    return y


def _write_row(x):
    y = x.clone()
    y[0] = x[1] * 2
    return y


def _write_element(x):
    y = x.clone()
    y[0, 1] = x.sum()
    return y


def _write_slice_of_view(x):
    y = x.clone()
    y.t()[1:, 0].mul_(3)
    return y


def _view_before_write(x):
    y = x.clone()
    row, column = y[0], y[:, 0]
    row.mul_(2)
    return y, row * column.sum(), column


def _base_write_seen_by_view(x):
    y = x.clone()
    row = y[1]
    y.sin_()
    return row * 2


def _view_of_view(x):
    y = x.clone()
    inner = y.view(-1)[1:5].view(2, 2)[1]
    inner.exp_()
    return y


def _diagonal(x):
    y = x.clone()
    y.diagonal().fill_(0.5)
    return y * x


def _unbound(x):
    y = x.clone()
    rows = list(y.unbind(0))
    return torch.stack([row * (i + 1) for i, row in enumerate(rows)])


def _split_write(x):
    y = x.clone()
    y[:1].add_(x[1:])
    y.narrow(1, 1, 2).neg_()
    return y


def _expand_then_clone(x):
    y = x[0].expand(2, 3).clone()
    y[1].mul_(x[1])
    return y


def _masked(x):
    y = x.clone()
    y.masked_fill_(x > 0, 0.25)
    y.clamp_(min=-0.5)
    return y * x


def _copy(x):
    y = torch.empty_like(x)
    y.copy_(x.sin())
    y[0].copy_(x[1])
    return y


def _swap(x):
    y = x.clone()
    row = y[0].clone()
    y[0] = y[1]
    y[1] = row
    return y * x


def _reshaped_in_place(x):
    y = x.clone().t_()
    y.unsqueeze_(0)
    y.squeeze_(0).mul_(2)
    return y.transpose_(0, 1) * x


def _fill_zeros(x):
    y = torch.zeros(2, 3, dtype=torch.float64)
    for i in range(2):
        y[i] = x[i].cumsum(0)
    return y


def _fill_views_of_zeros(x):
    y = torch.zeros(2, 3, dtype=torch.float64)
    corner = y.view(-1)[5]
    corner += x.sum()
    y[0] += x[0]
    return y * y


def _accumulate(x):
    total = torch.zeros((), dtype=torch.float64)
    for element in x.flatten():
        total += element.sin()
    return total


def _list_of_factories(x):
    parts = [torch.ones(3, dtype=torch.float64) for _ in range(2)]
    for part, row in zip(parts, x, strict=True):
        part.mul_(row)
    return torch.stack(parts)


def _out(x):
    y = torch.empty(2, 3, dtype=torch.float64)
    torch.exp(x.detach(), out=y)
    return y * x


def _index_put(x):
    y = x.clone()
    y[torch.tensor([0, 0]), torch.tensor([1, 2])] = x[1, :2]
    y[:, torch.tensor([0])] += 1
    return y


def _put_row_by_lane_index(x):
    y = x.clone()
    y[x[:, 0].argmax()] = 0.0
    return y * x


def _conditional_write(x):
    y = x.clone()
    y[x > 0] = 0.5
    return y * x


def _augmented(x):
    y = x * 1
    y += x
    y *= x
    y /= 2
    y -= x.sin()
    return y


FUNCTIONS = [
    _in_place_chain, _write_row, _write_element, _write_slice_of_view, _view_before_write, _base_write_seen_by_view,
    _view_of_view, _diagonal, _unbound, _split_write, _expand_then_clone, _masked, _copy, _swap, _reshaped_in_place,
    _fill_zeros, _fill_views_of_zeros, _accumulate, _list_of_factories, _out, _index_put, _put_row_by_lane_index,
    _conditional_write, _augmented,
]  # fmt: skip
SMOOTH = [f for f in FUNCTIONS if f is not _out]  # detach is no derivative
every = pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__.strip("_"))
smooth = pytest.mark.parametrize("f", SMOOTH, ids=lambda f: f.__name__.strip("_"))


def _x(*lead: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*lead, 2, 3, generator=generator, dtype=torch.float64)


@every
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_vmap(f: Callable, dim: int):
    x = _x(4).movedim(0, dim)
    before = x.clone()
    assert_same(vmap(f, in_dims=dim)(x), loop_vmap(f, dim)(x))
    assert_same(x, before)


@every
def test_vmap_vmap(f: Callable):
    x = _x(2, 3)
    assert_same(vmap(vmap(f), in_dims=1)(x), loop_vmap(loop_vmap(f), 1)(x))


@every
def test_backward_through_vmap(f: Callable):
    x = _x(3).requires_grad_()
    assert_same(autograd_grad(vmap(f))(x), autograd_grad(loop_vmap(f))(x))


@every
def test_grad_and_vmap_grad(f: Callable):
    x = _x(3)
    gradient = grad(lambda t: loss(f(t)))
    want = loop_vmap(autograd_grad(f))(x)[0]
    assert_same(gradient(x[0]), want[0])
    assert_same(vmap(gradient)(x), want)
    assert_same(grad(lambda t: loss(vmap(f)(t)))(x), autograd_grad(loop_vmap(f))(x)[0])


@smooth
def test_jvp_and_vmap_jvp(f: Callable):
    x, t = _x(3), _x(3).flip(0)
    want = [difference(f, (a,), (b,)) for a, b in zip(x, t, strict=True)]

    def tangent(a, b):
        out = jvp(f, (a,), (b,))[1]
        return (out,) if isinstance(out, torch.Tensor) else tuple(out)

    assert_same(tangent(x[0], t[0]), want[0], SECOND)
    assert_same(vmap(tangent)(x, t), tuple(torch.stack(c) for c in zip(*want, strict=True)), SECOND)


def test_jvp_of_a_product_with_itself_in_place():
    def f(t):
        y = t.clone()
        y *= y
        return y

    x, t = _x(), _x().flip(0)
    assert_same(jvp(f, (x,), (t,))[1], 2 * x * t)
    assert_same(vmap(lambda a, b: jvp(f, (a,), (b,))[1])(x, t), 2 * x * t)


@every
def test_double_backward(f: Callable):
    x = _x(3).requires_grad_()
    want = autograd_grad(autograd_grad(loop_vmap(f), create_graph=True))(x)
    assert_same(autograd_grad(autograd_grad(vmap(f), create_graph=True))(x), want)
    twice = grad(lambda t: loss(grad(lambda s: loss(f(s)))(t)))
    want = loop_vmap(autograd_grad(autograd_grad(f, create_graph=True)))(x.detach())[0]
    assert_same(vmap(twice)(x.detach()), want)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_writes_to_mapped_inputs_reach_the_caller(dim: int):
    x = _x(4).movedim(0, dim)
    want = x * 2 + 1
    version = x._version
    out = vmap(lambda t: t.mul_(2).add_(1), in_dims=dim, out_dims=dim)(x)
    assert_same(x, want)
    assert_same(out, want)
    assert x._version > version


def test_writes_to_part_of_a_mapped_input_reach_the_caller():
    x = _x(4)
    want = x.clone()
    want[:, 0, 1] = want[:, 1].sum(1)

    def f(t):
        t[0, 1] = t[1].sum()
        return t.sum()

    vmap(f)(x)
    assert_same(x, want)


def test_writes_reach_the_caller_through_two_vmaps():
    x = _x(2, 3)
    want = x.sin() + 1
    vmap(vmap(lambda t: t.sin_().add_(1), in_dims=1, out_dims=1), in_dims=0)(x.transpose(1, 2))
    assert_same(x, want)


def test_unmapped_argument_takes_writes_that_are_the_same_in_all_lanes():
    x, shared = _x(4), torch.zeros(3, dtype=torch.float64)
    vmap(lambda t, s: (s.add_(1), t.sum())[1], in_dims=(0, None))(x, shared)
    assert_same(shared, torch.ones(3, dtype=torch.float64))


def test_lane_values_do_not_fit_into_a_captured_tensor():
    x, captured = _x(4), torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"inplace arithmetic\(self, \*extra_args\) is not possible"):
        vmap(lambda t: captured.add_(t))(x)
    assert_same(captured, torch.zeros(2, 3, dtype=torch.float64))


def test_a_captured_leaf_that_requires_grad_refuses_writes():
    x, leaf = _x(2), torch.ones(3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad is being used in an in-place operation"):
        vmap(lambda t: (leaf.add_(1), t)[1])(x)
    with pytest.raises(RuntimeError):
        grad(lambda t: t.mul_(2).sum())(leaf)


def test_saved_values_that_were_overwritten_are_noticed():
    def f(t):
        y = t.exp()
        z = y.sum()
        y.add_(1)
        return z * y.sum()

    for mapped in (vmap(f), loop_vmap(f)):
        out = mapped(_x(3).requires_grad_())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        vmap(grad(f))(_x(3))


def test_version_counters_inside():
    def f(t):
        y = t.clone()
        start = y._version
        view = y[0]
        view.mul_(2)
        assert y._version == view._version == start + 1
        y.add_(1)
        assert view._version == start + 2
        return y

    assert_same(vmap(f)(_x(3)), loop_vmap(f)(_x(3)))
    grad(lambda t: f(t).sum())(_x())


def test_a_view_knows_its_base():
    def f(t):
        y = t.clone()
        assert y[0]._base is y
        assert y[0]._is_view()
        assert not y._is_view()
        return y

    vmap(f)(_x(2))
    grad(lambda t: f(t).sum())(_x())


def test_input_written_after_a_view_of_it_was_taken():
    def f(t):
        first = t[0]
        t.mul_(3)
        return first.clone()

    x = _x(4)
    want = x[:, 0] * 3
    assert_same(vmap(f)(x), want)


def test_a_view_of_the_input_that_is_returned_shares_memory_like_a_loop_stack_does_not():
    x = _x(4)
    out = vmap(lambda t: t[0])(x)
    want = out.clone()
    x.add_(1)
    # Either is allowed by the law (stack copies); what may not happen is a half-updated result.
    assert torch.equal(out, want) or torch.equal(out, want + 1)


def test_gradient_does_not_see_later_writes_to_the_input():
    x = _x()
    gradient = grad(lambda t: (t * t).sum())(x)
    want = 2 * x.clone()
    x.zero_()
    assert_same(gradient, want)


def test_vjp_may_be_called_after_writes_to_outputs():
    x = _x(3)
    out, pull = vjp(vmap(lambda t: t.sin()), x)
    want = pull(torch.ones_like(out))[0]
    out.zero_()
    assert_same(pull(torch.ones_like(x))[0], want)


def test_promoted_factory_keeps_dtype_and_layout():
    def f(t):
        y = torch.zeros(2, 3)  # float32 takes float64 lane values, rounded
        y[0] = t[0]
        z = torch.zeros(3, 2, dtype=torch.float64).t()
        z.copy_(t)
        return y, z

    assert_same(vmap(f)(_x(3)), loop_vmap(f)(_x(3)))


def test_promotion_reaches_every_alias():
    def f(t):
        y = torch.zeros(2, 3, dtype=torch.float64)
        alias, flat, row = y.detach(), y.view(-1), y[1]
        y[0] += t[0]
        return y, alias * 1, flat * 1, row * 1

    assert_same(vmap(f)(_x(3)), loop_vmap(f)(_x(3)))


def test_promotion_in_the_inner_of_two_vmaps_only():
    def outer(t):
        shared = torch.zeros(3, dtype=torch.float64)
        shared += t.sum((0, 1))

        def inner(row):
            y = torch.zeros(3, dtype=torch.float64)
            y += row[0]
            return y + shared

        return vmap(inner)(t)

    x = _x(2, 4)
    want = torch.stack([torch.stack([row[0] + t.sum((0, 1)) for row in t]) for t in x])
    assert_same(vmap(outer)(x), want)


@pytest.mark.parametrize("strides", [(1, 2), (3, 1), (10, 3)])
def test_promotion_keeps_the_layout_that_views_rely_on(strides: tuple[int, int]):
    def f(t):
        y = torch.empty_strided((2, 3), strides, dtype=torch.float64)
        y.copy_(t)
        column = y.as_strided((2,), (strides[0],), 0)
        column.mul_(2)
        return y * 1, column * 1

    assert_same(vmap(f)(_x(4)), loop_vmap(f)(_x(4)))
    assert_same(vmap(vmap(f), in_dims=1)(_x(2, 3)), loop_vmap(loop_vmap(f), 1)(_x(2, 3)))


PARTS = {
    "imaginary": lambda z: z.conj().imag,
    "real": lambda z: z.conj().real,
    "by function": lambda z: torch.imag(z.conj()),
    "part of the conjugate": lambda z: z.conj()[1:].imag,
    "conjugate of a part": lambda z: z[1:].conj().imag,
    "part of the part": lambda z: z.conj().imag[:1],
    "adjoint": lambda z: z.view(1, 2).mH.imag,
    "not lazy": lambda z: z.conj().conj().imag,
}


def _double(part):
    part.mul_(2)


def _fill(part):
    part[0] = 5.0


def _add_itself(part):
    part.add_(part * 1)


@pytest.mark.parametrize("write", [_double, _fill, _add_itself])
@pytest.mark.parametrize("take", PARTS.values(), ids=PARTS)
def test_parts_of_a_lazy_conjugate_are_views(take, write):
    """What is written to either shows in the other, of lanes and of what is the same in all, with derivatives."""
    xs = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0]], dtype=torch.float64)
    zs = torch.complex(xs, xs + 1)

    def through_the_part(z):
        z = z * 1
        write(part := take(z))
        return z + 0, part + 0

    def through_the_whole(z):
        z = z * 1
        part = take(z)
        z.mul_(2 - 1j)
        return z + 0, part + 0

    def captured(x):
        z = torch.complex(torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64))
        part = take(z)
        part.mul_(x[0])
        return z + 0, part + 0

    for f, given in ((through_the_part, zs), (through_the_whole, zs), (captured, xs)):
        wants = [torch.stack(parts) for parts in zip(*map(f, given))]
        for got in (vmap(f)(given), vmap(f, -1)(given.T.contiguous()), vmap(vmap(f))(given[None])):
            for out, want in zip(got, wants, strict=True):
                assert torch.equal(out.view(want.shape), want)
        if f is not through_the_whole:
            _slopes_as_the_loop(f, given)


def _slopes_as_the_loop(f, given):
    def size(outs):
        return sum((out.abs() ** 2).sum() for out in outs)

    leaf = given.clone().requires_grad_()
    (want,) = torch.autograd.grad(sum(size(f(x)) for x in leaf), leaf)
    torch.testing.assert_close(grad(lambda given: size(vmap(f)(given)))(given), want)
    torch.testing.assert_close(vmap(grad(lambda x: size(f(x))))(given), want)
    for x, slope in zip(given, want):
        pushed = jvp(lambda x: size(f(x)), (x,), (x,))[1]
        torch.testing.assert_close(pushed, (slope.conj() * x).real.sum())


def test_a_lazy_conjugate_that_is_resolved_is_a_copy():
    def f(x):
        z = torch.complex(x, x * x)
        lazy = z.conj()
        resolved = lazy.resolve_conj()
        resolved.mul_(2)
        same = z.resolve_conj()
        same[0] = 3
        return lazy.real + lazy.imag + resolved.imag + z.real * x

    xs = torch.rand(3, 2, dtype=torch.float64)
    want = torch.stack([f(x) for x in xs])
    assert torch.equal(vmap(f)(xs), want)
    assert torch.equal(vmap(vmap(f))(xs[None])[0], want)
    assert torch.equal(jvp(vmap(f), (xs,), (xs,))[0], want)
    _slopes_as_the_loop(lambda x: (f(x),), xs)


DETACHED = {
    "written after": lambda y, d, x: y.mul_(x.sum()),
    "an element written after": lambda y, d, x: y.__setitem__(0, x[0] * x[1]),
    "written through": lambda y, d, x: d.mul_(x.sum()),
    "both written": lambda y, d, x: (y.__setitem__(0, x[0] * x[1]), d.mul_(2)),
    "a view written": lambda y, d, x: y[1:].copy_(x[:2] ** 2),
}


@pytest.mark.parametrize("write", DETACHED)
@pytest.mark.parametrize("make", ["made inside", "computed"])
@pytest.mark.parametrize("of_view", [False, True])
def test_what_is_detached_has_the_values_that_are_written_and_no_history(write: str, make: str, of_view: bool):
    def f(x):
        y = torch.ones(3, dtype=torch.float64) if make == "made inside" else x * 2
        d = (y.view(3, 1) if of_view else y).detach()
        part = d[1:]
        DETACHED[write](y, d, x)
        return (d.sin() ** 2).sum() + (part * x[0]).sum() * y[0] + x.sum()

    xs = _x()
    for _ in range(3):
        assert_same(vmap(f)(xs), loop_vmap(f)(xs))
        want = torch.stack([torch.autograd.functional.jacobian(f, x) for x in xs])
        assert_same(vmap(grad(f))(xs), want)
        assert_same(vmap(vmap(grad(f)))(xs[None])[0], want)
        assert_same(grad(lambda xs: vmap(f)(xs).sum())(xs), want)
        assert_same(grad(lambda xs: vmap(vmap(f))(xs[None]).sum())(xs), want)
