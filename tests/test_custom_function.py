"""Custom `torch.autograd.Function`s under every transform: the derivative is the one the user wrote, on every plane.

Most backwards here are wrong on purpose, by a factor that forward does not have: a transform that differentiates
forward's own operations gives other numbers than a loop of plain torch.autograd.
"""

import gc
import weakref
from types import MethodType

import numpy
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import lanewise
from lanewise import errors, grad, jacfwd, jacrev, jvp, vjp, vmap
from lanewise._torch_compat import APPLY_IS_PYTHON, FACTORY_KEY, OUTSIDE_KEY, tls_is_included
from tests.oracles import assert_same, loop_vmap


class OldStyle(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x * w).sin()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 3 * g * w * (x * w).cos(), 5 * g * x * (x * w).cos()


class NewStyle(Function):
    @staticmethod
    def forward(x, w, power=3):
        return x**power * w, x + w.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, ctx.power = inputs
        ctx.save_for_backward(x, w, output[1])

    @staticmethod
    def backward(ctx, g, h):
        x, w, total = ctx.saved_tensors
        return 7 * g * ctx.power * x * w + h * total, g * x**ctx.power + 2 * h * w.exp(), None


class Attributes(Function):
    """Tensors on ctx as attributes, alone and in containers; an output and an intermediate among them."""

    @staticmethod
    def forward(ctx, x, w):
        middle = x * w
        y = middle.exp()
        ctx.x, ctx.rest = x, {"w": w, "pair": [y, middle.cos()]}
        ctx.factor = 3.0
        return y

    @staticmethod
    def backward(ctx, g):
        y, cos = ctx.rest["pair"]
        return ctx.factor * g * y * ctx.rest["w"], g * y * ctx.x * cos


class Sorted(Function):
    """Two outputs, one not differentiable; gradients may be None."""

    @staticmethod
    def forward(ctx, x, w):
        values, order = (x * w).sort()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(order, x, w)
        return values, order

    @staticmethod
    def backward(ctx, g, unused):
        assert unused is None
        if g is None:
            return None, None
        order, x, w = ctx.saved_tensors
        back = torch.zeros_like(g).scatter(0, order, g)
        return 2 * back * w, 3 * back * x


class InPlace(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        ctx.mark_dirty(x)
        return x.mul_(w)

    @staticmethod
    def backward(ctx, g):
        (w,) = ctx.saved_tensors
        return 4 * g * w, g * w.cos()


class Inner(Function):
    """Another Function in forward, and one in backward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return OldStyle.apply(x, w) * 2

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return OldStyle.apply(g * x, w), g * x


class Vjp(Function):
    """The formula under its other name, with a factor that is cut off."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def vjp(ctx, g):
        x, w = ctx.saved_tensors
        return g * w * (x.detach().sin() + 2), g * x * w.detach()


class NotRecorded(Function):
    """A block of backward that reverse mode does not see; forward mode does, as in torch."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        with torch.no_grad():
            scale = x.sin() + 2
        return g * w * scale, g * x * w


def old_style(x, w):
    return OldStyle.apply(x, w)


def new_style(x, w):
    a, b = NewStyle.apply(x, w)
    return a * b.sin()


def one_of_two(x, w):
    return NewStyle.apply(x, w, 2)[1]


def attributes(x, w):
    return Attributes.apply(x, w)


def sorted_values(x, w):
    values, order = Sorted.apply(x, w)
    return values * order.to(values.dtype)


def in_place(x, w):
    return InPlace.apply(x * 1.0, w)


def inner(x, w):
    return Inner.apply(x, w)


def other_name(x, w):
    return Vjp.apply(x, w)


def not_recorded(x, w):
    return NotRecorded.apply(x, w)


def twice(x, w):
    return OldStyle.apply(OldStyle.apply(x, w), w)


PROGRAMS = [
    old_style,
    new_style,
    one_of_two,
    attributes,
    sorted_values,
    in_place,
    inner,
    other_name,
    not_recorded,
    twice,
]


def plain_grad(f):
    """The gradient in the first argument, by plain torch.autograd, recorded itself."""

    def gradient(x, *rest):
        with torch.enable_grad():
            x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
            (g,) = torch.autograd.grad(f(x, *rest), x, create_graph=True, allow_unused=True, materialize_grads=True)
        return g

    return gradient


def plain_jvp(f):
    """The tangent along ones, as the derivative in u of J'u, by plain torch.autograd."""

    def tangent(x, *rest):
        with torch.enable_grad():
            x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
            y = f(x, *rest)
            u = torch.zeros_like(y, requires_grad=True)
            (pulled,) = torch.autograd.grad(y, x, u, create_graph=True)
            (pushed,) = torch.autograd.grad(pulled, u, torch.ones_like(x), create_graph=True)
        return pushed

    return tangent


def plain_gradient(value, leaf):
    """By plain torch.autograd, zeros where the leaf does not matter."""
    if not value.requires_grad:
        return torch.zeros_like(leaf)
    return torch.autograd.grad(value, leaf, allow_unused=True, materialize_grads=True)[0]


def our_jvp(f):
    return lambda x, *rest: jvp(lambda y: f(y, *rest), (x,), (torch.ones_like(x),))[1]


class Ours:
    vmap = staticmethod(lambda f: vmap(f, in_dims=(0, None)))
    grad = staticmethod(grad)
    jvp = staticmethod(our_jvp)


class Loop:
    vmap = staticmethod(lambda f: loop_vmap(f, in_dims=(0, None)))
    grad = staticmethod(plain_grad)
    jvp = staticmethod(plain_jvp)


def summed(f):
    return lambda *args: f(*args).sin().sum()


NESTINGS = {
    "f": lambda f, T: f,
    "vmap": lambda f, T: T.vmap(f),
    "grad": lambda f, T: T.vmap(lambda x, w: T.grad(summed(f))(x, w)),
    "grad of vmap": lambda f, T: T.grad(summed(T.vmap(f))),
    "jvp": lambda f, T: T.vmap(T.jvp(f)),
    "jvp of vmap": lambda f, T: T.jvp(T.vmap(f)),
    "grad of grad": lambda f, T: T.vmap(T.grad(summed(T.grad(summed(f))))),
    "grad of vmap of grad": lambda f, T: T.grad(summed(T.vmap(T.grad(summed(f))))),
    "jvp of vmap of grad": lambda f, T: T.jvp(T.vmap(T.grad(summed(f)))),
    "grad of jvp": lambda f, T: T.vmap(T.grad(summed(T.jvp(f)))),
    "grad of vmap of jvp": lambda f, T: T.grad(summed(T.vmap(T.jvp(f)))),
}


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_nestings(program, nesting):
    """Values, and the outer gradient of a captured parameter that is summed over the lanes."""
    if program is not_recorded and nesting == "jvp of vmap of grad":
        pytest.skip("torch's forward mode differentiates what no_grad hides from reverse mode")
    xs = torch.randn(4, 3, dtype=torch.float64)
    w = torch.randn(3, dtype=torch.float64)
    x = xs[0] if nesting == "f" else xs
    results = []
    for tools in (Ours, Loop):
        leaf = w.clone().requires_grad_()
        out = NESTINGS[nesting](program, tools)(x, leaf)
        gradient = plain_gradient(out.cos().sum(), leaf)
        results.append((out.detach(), gradient))
    assert_same(*results)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("in_dims", [((0, None), (0, 0)), ((0, 0), (None, 0)), ((1, None), (0, None))])
def test_two_vmaps(program, in_dims):
    """Each level with its own mapped operands, and the gradients of both operands from outside."""
    inner_dims, outer_dims = in_dims
    if program is in_place and outer_dims[0] is None:
        pytest.skip("lane values into a tensor that has none of those lanes: refused, as for any in-place operation")
    shape = [3]
    shapes = [list(shape), list(shape)]
    for dims, size in ((inner_dims, 2), (outer_dims, 4)):
        for k, dim in enumerate(dims):
            if dim is not None:
                shapes[k].insert(dim, size)
    values = [torch.randn(s, dtype=torch.float64) for s in shapes]
    results = []
    for nest in (lambda f, d: vmap(f, in_dims=d), lambda f, d: loop_vmap(f, in_dims=d)):
        leaves = [v.clone().requires_grad_() for v in values]
        out = nest(nest(program, inner_dims), outer_dims)(*leaves)
        results.append((out.detach(), torch.autograd.grad(out.sin().sum(), leaves)))
    assert_same(*results)


@pytest.mark.parametrize("lanes", [0, 1])
def test_few_lanes(lanes):
    xs = torch.randn(lanes, 3, dtype=torch.float64)
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    out = vmap(grad(summed(old_style)), in_dims=(0, None))(xs, w)
    (got,) = torch.autograd.grad(out.sum(), w)
    assert out.shape == (lanes, 3)
    want = sum((plain_grad(summed(old_style))(x, w).sum() for x in xs), (0 * w).sum())
    assert_same(got, torch.autograd.grad(want, w)[0])


def test_backward_runs_once_and_not_per_lane():
    calls = []

    class Counted(Function):
        @staticmethod
        def forward(ctx, x):
            calls.append("forward")
            return x * 2

        @staticmethod
        def backward(ctx, g):
            calls.append("backward")
            return g * 5

    xs = torch.randn(6, 3)
    assert_same(vmap(grad(lambda x: Counted.apply(x).sum()))(xs), torch.full((6, 3), 5.0))
    assert calls == ["forward", "backward"]


def test_what_ctx_says():
    seen = []

    class Asks(Function):
        @staticmethod
        def forward(ctx, x, w, label, flag=True):
            seen.append((ctx.needs_input_grad, tuple(x.shape), label, flag))
            ctx.label = label
            return x * w

        @staticmethod
        def backward(ctx, g):
            seen.append((ctx.needs_input_grad, tuple(g.shape), ctx.label))
            return (g * 2 if ctx.needs_input_grad[0] else None), (g * 3 if ctx.needs_input_grad[1] else None), None

    xs, w = torch.randn(4, 3), torch.randn(3)
    assert_same(vmap(grad(lambda x: Asks.apply(x, w, "name").sum()))(xs), torch.full((4, 3), 2.0))
    assert seen == [((True, False, False), (3,), "name", True), ((True, False, False), (3,), "name")]


def test_outputs_that_are_no_tensors_and_inputs_returned():
    class Odd(Function):
        @staticmethod
        def forward(ctx, x, w):
            return x, "text", w * 2

        @staticmethod
        def backward(ctx, g, nothing, h):
            assert nothing is None
            return g * 3, h * 5

    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    xs = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def f(x):
        a, text, b = Odd.apply(x, w)
        assert text == "text"
        assert a is not x
        return (a * b).sum()

    got = torch.autograd.grad(vmap(f)(xs).sum(), (xs, w))
    assert_same(got, (6 * w.detach().expand(4, 3), 5 * xs.detach().sum(0)))


def test_unmapped_operands_only():
    """The same in all lanes: the result has no lanes, and its gradient is not counted once more per lane."""
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    xs = torch.randn(4, 3, dtype=torch.float64)

    def f(x):
        return (x * OldStyle.apply(torch.ones(3, dtype=torch.float64), w)).sum()

    (got,) = torch.autograd.grad(vmap(f)(xs).sum(), w)
    (want,) = torch.autograd.grad(sum(f(x) for x in xs), w)
    assert_same(got, want)


def test_in_place_on_a_tensor_made_inside():
    """Lane values written by forward into a tensor that had none, and into a view of it."""

    class Write(Function):
        @staticmethod
        def forward(ctx, target, x):
            ctx.mark_dirty(target)
            return target.add_(x)

        @staticmethod
        def backward(ctx, g):
            return g * 2, g * 3

    xs = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def f(x):
        target = torch.zeros(3, dtype=torch.float64)
        out = Write.apply(target, x)
        assert out is target
        return target * x

    got = vmap(f)(xs)
    want = torch.stack([f(x) for x in xs])
    assert_same(got.detach(), want.detach())
    assert_same(torch.autograd.grad(got.sum(), xs)[0], torch.autograd.grad(want.sum(), xs)[0])


def test_broadcast_gradient_is_reduced():
    class Wide(Function):
        @staticmethod
        def forward(ctx, x, w):
            return x + w

        @staticmethod
        def backward(ctx, g):
            return g, g

    xs = torch.randn(5, 4, 3, dtype=torch.float64)
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, 3, dtype=torch.float64)
    (got,) = torch.autograd.grad(vmap(lambda x: (Wide.apply(x, w) * weights).sum())(xs).sum(), w)
    assert_same(got, 5 * weights.sum(0))


def test_wrong_number_of_gradients_is_said():
    class Short(Function):
        @staticmethod
        def forward(ctx, x, w):
            return x * w

        @staticmethod
        def backward(ctx, g):
            return g

    with pytest.raises(
        RuntimeError, match=r"ShortBackward returned an incorrect number of gradients \(expected 2, got 1"
    ):
        vmap(grad(lambda x: Short.apply(x, x).sum()))(torch.randn(2, 3))


def test_once_differentiable():
    class Once(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @once_differentiable
        def backward(ctx, g):
            return g * 5 * ctx.saved_tensors[0]

    xs = torch.randn(4, 3)
    f = lambda x: Once.apply(x).sum()
    assert_same(vmap(grad(f))(xs), 5 * xs)
    assert_same(grad(lambda X: vmap(f)(X).sum())(xs), 5 * xs)
    for second in (vmap(grad(lambda x: grad(f)(x).sum())), grad(lambda X: vmap(grad(f))(X).sum())):
        with pytest.raises(RuntimeError, match="trying to differentiate twice"):
            second(xs)
    with pytest.raises(NotImplementedError, match="You must implement the jvp function for custom autograd.Function"):
        jvp(f, (xs[0],), (xs[0],))


class WithJvp(Function):
    """x ** 3 with a right backward and a right jvp."""

    @staticmethod
    def forward(x, scale):
        return x**3 * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.scale = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 3 * x**2 * ctx.scale, None

    @staticmethod
    def jvp(ctx, t, _):
        (x,) = ctx.saved_tensors
        return t * 3 * x**2 * ctx.scale


def test_users_jvp_at_every_depth():
    x = torch.randn(3, dtype=torch.float64)
    f = lambda x: WithJvp.apply(x, 2.0)
    first, second = 6 * x**2, 12 * x
    third = torch.full_like(x, 12.0)
    ones = torch.ones_like(x)
    once = our_jvp(f)
    assert_same(once(x), first)
    assert_same(our_jvp(once)(x), second)
    assert_same(our_jvp(our_jvp(once))(x), third)
    assert_same(jacfwd(jacfwd(f))(x).sum((1, 2)), second)
    assert_same(jacfwd(jacrev(f))(x).sum((1, 2)), second)
    assert_same(jacrev(jacfwd(f))(x).sum((1, 2)), second)
    assert_same(grad(lambda y: once(y).sum())(x), second)
    assert_same(vmap(our_jvp(our_jvp(f)))(x.expand(2, 3)), second.expand(2, 3))
    assert_same(our_jvp(vmap(our_jvp(f)))(x.expand(2, 3)), second.expand(2, 3))
    leaf = x.clone().requires_grad_()
    once(leaf).sum().backward()
    assert leaf.grad is not None
    assert_same(leaf.grad, second * ones)


def test_users_jvp_is_the_one_used():
    class Lies(Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_forward(x)
            ctx.save_for_backward(w)
            return x * w, x + w

        @staticmethod
        def backward(ctx, g, h):
            return g + h, g

        @staticmethod
        def jvp(ctx, t, s):
            (x,) = ctx.saved_tensors
            return t * 11 * x + s, t

    x, w = torch.randn(3), torch.randn(3)
    _, (a, b) = jvp(lambda x: Lies.apply(x, w), (x,), (torch.ones(3),))
    assert_same((a, b), (11 * x, torch.ones(3)))
    _, (a, b) = jvp(vmap(lambda x: Lies.apply(x, w)), (x.expand(2, 3),), (torch.ones(2, 3),))
    assert_same((a, b), ((11 * x).expand(2, 3), torch.ones(2, 3)))


def test_native_forward_mode_around_and_inside():
    x = torch.randn(3, dtype=torch.float64)
    xs = torch.randn(4, 3, dtype=torch.float64)
    f = lambda x: WithJvp.apply(x, 2.0)
    with forward_ad.dual_level():
        out = vmap(f)(forward_ad.make_dual(xs, torch.ones_like(xs)))
        assert_same(forward_ad.unpack_dual(out).tangent, 6 * xs**2)

    def native(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent

    assert_same(vmap(native)(xs), 6 * xs**2)
    assert_same(vmap(grad(lambda x: native(x).sum()))(xs), 12 * xs)
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="You must implement the jvp function"):
            vmap(old_style, in_dims=(0, None))(forward_ad.make_dual(xs, xs), x)


class ByRule(Function):
    """A `vmap` staticmethod that says 100 where forward says 1, so that its use is seen."""

    seen: list = []

    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w * 2, (g * x * 3).sum_to_size(w.shape)

    @staticmethod
    def vmap(info, in_dims, x, w):
        ByRule.seen.append((info.batch_size, info.randomness, in_dims))
        x = x.movedim(in_dims[0], 0) if in_dims[0] is not None else x.expand(info.batch_size, *x.shape)
        w = w.movedim(in_dims[1], 0) if in_dims[1] is not None else w.expand(info.batch_size, *w.shape)
        return ByRule.apply(x, w).movedim(0, -1) * 100, -1


def test_users_vmap_rule():
    ByRule.seen.clear()
    xs, w = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64, requires_grad=True)
    out = vmap(ByRule.apply, in_dims=(0, None))(xs, w)
    assert ByRule.seen == [(4, "error", (0, None))]
    assert_same(out.detach(), 100 * xs * w.detach())
    # From outside the derivative of the rule counts; on the plane itself the user's backward.
    (got,) = torch.autograd.grad(out.sum(), w)
    assert_same(got, 300 * xs.sum(0))
    got = vmap(grad(lambda x, w: ByRule.apply(x, w).sum()), in_dims=(0, None))(xs, w)
    assert_same(got.detach(), 2 * w.detach().expand(4, 3))
    ByRule.seen.clear()
    deep = torch.randn(2, 4, 3, dtype=torch.float64)
    assert_same(
        vmap(vmap(ByRule.apply, in_dims=(0, None)), in_dims=(0, None))(deep, w).detach(), 1e4 * deep * w.detach()
    )
    assert [seen[0] for seen in ByRule.seen] == [4, 2]


def test_vmap_rules_that_do_not_fit():
    def with_rule(rule, **attributes):
        return type(
            "Ruled",
            (Function,),
            {
                "forward": staticmethod(lambda x: x * 2),
                "setup_context": staticmethod(lambda ctx, inputs, output: None),
                "vmap": staticmethod(rule),
                **attributes,
            },
        )

    xs = torch.randn(4, 3)
    both = with_rule(lambda info, in_dims, x: (x, 0), generate_vmap_rule=True)
    with pytest.raises(RuntimeError, match="it has both generate_vmap_rule=True and an overridden vmap"):
        vmap(both.apply)(xs)
    with pytest.raises(RuntimeError, match="Expected the vmap staticmethod to have two returns"):
        vmap(with_rule(lambda info, in_dims, x: x).apply)(xs)
    with pytest.raises(RuntimeError, match=r"returned an incompatible \(output, out_dims\) tuple"):
        vmap(with_rule(lambda info, in_dims, x: (x, (0, 0))).apply)(xs)


def test_generate_vmap_rule_is_accepted():
    class Generated(OldStyle):
        generate_vmap_rule = True

    xs, w = torch.randn(4, 3), torch.randn(3)
    assert_same(vmap(Generated.apply, in_dims=(0, None))(xs, w), (xs * w).sin())


def test_tensors_by_keyword_are_refused():
    class Keyword(Function):
        @staticmethod
        def forward(ctx, x, *, w):
            return x * w

    with pytest.raises(NotImplementedError, match="Run vmap on autograd.Function with kwarg-only Tensor args"):
        vmap(lambda x: Keyword.apply(x, w=x))(torch.randn(2, 3))


def test_bound_apply_taken_before():
    """`relu = MyRelu.apply` at module level is the same thing whenever it was taken; or an error, in newer torches."""
    xs, w = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    if not APPLY_IS_PYTHON:
        original = torch._C._FunctionBase.__dict__["apply"].__get__(None, OldStyle)
        sums = lambda X, w: original(X, w).sum()
        for f in (vmap(original, in_dims=(0, None)), vmap(grad(sums), in_dims=(0, None)), jacfwd(original)):
            with pytest.raises(errors.FunctionError, match="taken before lanewise was imported"):
                f(xs, w)
        assert_same(grad(sums)(xs, w), 3 * w * (xs * w).cos())  # where there is only autograd, it is right as it is
        return
    original = MethodType(Function.__dict__["apply"].__func__, OldStyle)
    got = grad(lambda X: vmap(original, in_dims=(0, None))(X, w).sum())(xs)
    assert_same(got, 3 * w * (xs * w).cos())


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="set_output_grad_dtype is new in torch 2.14")
@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_dtype_of_the_gradient(dtype):
    """Backward gets its gradient in the dtype that forward asked for, on every plane."""
    seen = []

    class Halved(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_output_grad_dtype(dtype)
            return x.half()

        @staticmethod
        def backward(ctx, g):
            seen.append(g.dtype)
            return 3 * g.float()

    xs, c = torch.randn(4, 3), torch.randn(3)

    def f(x):
        return (Halved.apply(x).float() * c).sum()

    expected = dtype or torch.float16
    for got in (vmap(grad(f))(xs), grad(lambda xs: vmap(f)(xs).sum())(xs), vmap(vmap(grad(f)))(xs[None])[0]):
        assert_same(got, (3 * c.half().float()).expand(4, 3))
    assert set(seen) == {expected}


def test_plain_tensors_go_torchs_own_way():
    x = torch.randn(3, requires_grad=True)
    y = OldStyle.apply(x, x)
    assert type(y.grad_fn).__name__ == "OldStyleBackward"
    assert isinstance(y.grad_fn, OldStyle._backward_cls)


def test_cotangents_with_lanes():
    """The Function is recorded under one vmap and pulled back under another that opened later."""
    xs = torch.randn(4, 3, dtype=torch.float64)
    w = torch.randn(3, dtype=torch.float64)
    _, back = vjp(vmap(old_style, in_dims=(0, None)), xs, w)
    basis = torch.eye(12, dtype=torch.float64).reshape(12, 4, 3)
    by_x, by_w = vmap(back)(basis)
    loops = [back(row) for row in basis]
    assert_same(by_x, torch.stack([a for a, _ in loops]))
    assert_same(by_w, torch.stack([b for _, b in loops]))
    assert_same(jacrev(lambda X: vmap(old_style, in_dims=(0, None))(X, w))(xs).reshape(12, 4, 3), by_x)


def test_random_forward():
    class Noisy(Function):
        @staticmethod
        def forward(ctx, x):
            noise = torch.rand(3)
            ctx.save_for_backward(noise)
            return x * noise

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    xs = torch.ones(4, 3)
    out = vmap(lambda x: Noisy.apply(x), randomness="different")(xs)
    assert len(out.unique()) == 12
    y, g = vmap(lambda x: (Noisy.apply(x), grad(lambda z: Noisy.apply(z).sum())(x)), randomness="same")(xs)
    assert_same(y, y[:1].expand(4, 3))
    assert_same(g, g[:1].expand(4, 3))
    leaf = xs.clone().requires_grad_()
    out = vmap(lambda x: Noisy.apply(x), randomness="different")(leaf)
    assert_same(torch.autograd.grad(out.sum(), leaf)[0], out.detach())
    with pytest.raises(errors.RandomnessError):
        vmap(lambda x: Noisy.apply(x))(xs)


@pytest.mark.parametrize("new_style", [False, True])
def test_random_forward_of_captured_tensors(new_style):
    def draw(x):
        return x * torch.bernoulli(torch.full((300,), 0.5)) + torch.rand_like(x)

    class Noisy(Function):
        if new_style:
            forward = staticmethod(draw)  # type: ignore[assignment]

            @staticmethod
            def setup_context(ctx, inputs, output):
                ctx.save_for_backward(output)
        else:

            @staticmethod
            def forward(ctx, x):
                out = draw(x)
                ctx.save_for_backward(out)
                return out

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    w, xs = torch.ones(300, requires_grad=True), torch.zeros(4, 300)
    out = vmap(lambda x: Noisy.apply(w) + x, randomness="different")(xs)
    assert len(out.detach().unique(dim=0)) == 4
    assert_same(torch.autograd.grad(out.sum(), w)[0], out.detach().sum(0))
    out = vmap(lambda x: Noisy.apply(w) + x, randomness="same")(xs)
    assert len(out.detach().unique(dim=0)) == 1
    assert_same(torch.autograd.grad(out.sum(), w)[0], out.detach().sum(0))

    def slope(x):
        out, back = vjp(lambda w: Noisy.apply(w) + x, w.detach())
        return back(torch.ones(300))[0], out

    slopes, out = vmap(slope, randomness="different")(xs)
    assert len(out.unique(dim=0)) == 4
    assert_same(slopes, out)
    nested = vmap(vmap(lambda x: Noisy.apply(w) + x, randomness="same"), randomness="different")(xs.view(2, 2, 300))
    assert torch.equal(nested[0, 0], nested[0, 1]) and not torch.equal(nested[0], nested[1])
    with pytest.raises(errors.RandomnessError):
        vmap(lambda x: Noisy.apply(w) + x)(xs)


class InNumpy(Function):
    """Everything in NumPy; the backward keeps an array of its own as a tensor."""

    @staticmethod
    def forward(ctx, x, w):
        order = torch.from_numpy(x.detach().numpy().argsort().copy())
        ctx.save_for_backward(order, w)
        return torch.from_numpy(x.detach().numpy()[order.numpy()] * w.detach().numpy())

    @staticmethod
    def backward(ctx, g):
        order, w = ctx.saved_tensors
        back = torch.zeros(3, dtype=torch.float64)
        back[order] = torch.from_numpy(g.detach().numpy() * w.detach().numpy() * 3)
        return back, g * 2


class NumpyBackward(Function):
    """Ordinary operations forward, NumPy backward, a choice by value in both."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w if x.sum() > 0 else x - w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        factor = float(numpy.abs(x.detach().numpy()).sum())
        return g * factor, g * x


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("nesting", ["vmap", "grad", "grad of vmap"])
@pytest.mark.parametrize("function", [InNumpy, NumpyBackward])
def test_numpy_and_python_choices_run_per_lane(function, nesting):
    program = lambda x, w: function.apply(x, w)
    xs = torch.randn(4, 3, dtype=torch.float64)
    results = []
    for tools in (Ours, Loop):
        w = torch.ones(3, dtype=torch.float64, requires_grad=True)
        out = NESTINGS[nesting](program, tools)(xs, w)
        first = torch.zeros(()) if nesting != "vmap" else plain_gradient(out.sum(), w)
        results.append((out.detach(), first))
    assert_same(*results)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
def test_numpy_under_two_vmaps():
    xs = torch.randn(2, 4, 3, dtype=torch.float64)
    w = torch.ones(3, dtype=torch.float64)
    f = lambda x: InNumpy.apply(x, w)
    assert_same(vmap(vmap(f))(xs), loop_vmap(loop_vmap(f))(xs))
    g = grad(lambda x: f(x).sin().sum())
    assert_same(vmap(vmap(g))(xs), loop_vmap(loop_vmap(plain_grad(lambda x: f(x).sin().sum())))(xs).detach())


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("positions", [(0,), (1,), (0, 1)])
def test_tangents_of_a_backward_in_numpy(positions):
    """Autograd cannot see how the backward depends on the cotangent: J'u is no function of u for it."""
    xs, vs = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    f = lambda x, w: (InNumpy.apply(x, w), 2 * x)

    def jacobian(x, w):
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        out = f(*leaves)[0]
        rows = [torch.autograd.grad(out, leaves, unit, retain_graph=True) for unit in torch.eye(3, dtype=torch.float64)]
        return torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])

    def tangent(x, w, v, u):
        return sum(block @ (v, u)[k] for k, block in enumerate(jacobian(x, w)) if k in positions)

    def ours(x, w, v, u):
        primals = [(x, w)[k] for k in positions]
        varied = lambda *ps: f(*[ps[positions.index(k)] if k in positions else (x, w)[k] for k in range(2)])
        return jvp(varied, tuple(primals), tuple((v, u)[k] for k in positions))[1][0]

    want = loop_vmap(tangent)(*xs, *vs).detach()
    assert_same(ours(xs[0, 0], xs[1, 0], vs[0, 0], vs[1, 0]), want[0])
    assert_same(vmap(ours)(*xs, *vs), want)
    assert_same(
        vmap(ours, in_dims=(0, None, None, 0))(xs[0], xs[1, 0], vs[0, 0], vs[1]),
        loop_vmap(tangent, (0, None, None, 0))(xs[0], xs[1, 0], vs[0, 0], vs[1]),
    )
    if positions == (0, 1):
        want = [torch.stack(blocks) for blocks in zip(*[jacobian(x, w) for x, w in zip(*xs)])]
        got = vmap(jacfwd(lambda x, w: f(x, w)[0], argnums=(0, 1)))(*xs)
        assert_same(got, tuple(block.detach() for block in want))
        both = jvp(vmap(lambda x, w: f(x, w)[0]), tuple(xs), tuple(vs))[1]
        assert_same(both, loop_vmap(tangent)(*xs, *vs).detach())


def test_tangents_of_a_backward_that_detaches_complex_numbers():
    class Squared(Function):
        @staticmethod
        def forward(ctx, z):
            ctx.save_for_backward(z)
            return z * z

        @staticmethod
        def backward(ctx, g):
            return torch.from_numpy(
                2 * g.detach().numpy() * ctx.saved_tensors[0].detach().conj().resolve_conj().numpy()
            )

    z, v = torch.randn(2, 3, dtype=torch.complex128)
    with pytest.warns(errors.SlowPathWarning, match="backward of Squared does not tell autograd"):
        assert_same(jvp(Squared.apply, (z,), (v,))[1], 2 * z * v)
    assert_same(jvp(Squared.apply, (z,), (v,))[1], 2 * z * v)


def test_running_per_lane_is_said_once():
    class Slow(NumpyBackward):
        pass

    xs, w = torch.randn(4, 3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    xs[0] = xs[1].abs()
    xs[1] = -xs[0]
    with pytest.warns(errors.SlowPathWarning, match="Slow asks for Python values or NumPy arrays"):
        vmap(Slow.apply, in_dims=(0, None))(xs, w)
    vmap(Slow.apply, in_dims=(0, None))(xs, w)


class Positive(Function):
    @staticmethod
    def forward(ctx, x):
        positive = torch.from_numpy(x.detach().numpy()[x.detach().numpy() > 0])
        ctx.save_for_backward(positive)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Sometimes(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(*[x] * int(x[0] > 0))
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


@pytest.mark.parametrize(
    "function, text",
    [
        (Positive, "the tensors it keeps on ctx have different shapes"),
        (Sometimes, "other tensors on ctx in some lanes"),
    ],
)
def test_tensors_that_lanes_keep_must_fit(function, text):
    with pytest.warns(errors.SlowPathWarning), pytest.raises(RuntimeError, match=text):
        vmap(function.apply)(torch.tensor([[1.0, 1.0], [-1.0, 1.0]]))


def test_escaped_argument():
    kept = []
    vmap(lambda x: kept.append(x) or x)(torch.randn(2, 3))
    with pytest.raises(errors.EscapedTensorError, match="may have escaped from inside a function being vmapped"):
        OldStyle.apply(kept[0], kept[0])


def test_saved_tensors_are_freed_and_checked():
    xs = torch.randn(4, 3, requires_grad=True)
    out = vmap(lambda x: OldStyle.apply(x, x))(xs).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()
    ys = xs.detach().clone()
    leaf = torch.ones(4, 3, requires_grad=True)
    out = vmap(lambda y, z: OldStyle.apply(y, z))(ys, leaf).sum()
    ys.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_no_reference_is_left():
    gc.collect()
    gc.disable()
    try:
        xs = torch.randn(4, 3, requires_grad=True)
        out = vmap(lambda x: OldStyle.apply(x, x))(xs).sum()
        out.backward()
        ref = weakref.ref(xs)
        del xs, out
        assert ref() is None
    finally:
        gc.enable()


def test_lanewise_is_the_package_under_test():
    assert lanewise.vmap is vmap


class _KeepsVariable(torch.autograd.Function):
    """Has an attribute of the name that the nodes of leaves have."""

    @staticmethod
    def forward(ctx, x):
        ctx.variable = x
        return x * 2

    @staticmethod
    def backward(ctx, cotangent):  # type: ignore[override]
        return cotangent * ctx.variable


def test_an_attribute_named_as_that_of_leaves():
    x = torch.tensor([1.0, 2.0])
    gradient = lanewise.grad(lambda x: _KeepsVariable.apply(x).sum())(x)
    assert torch.equal(gradient, x)
    assert not gradient.requires_grad
    inside = lanewise.vmap(lambda x: torch.autograd.grad(_KeepsVariable.apply(x.requires_grad_()), x)[0])(x.clone())
    assert torch.equal(inside, x)


class _Triples(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx, cotangent):  # type: ignore[override]
        return cotangent * 3


def _written_in_a_branch(x):
    if x.sum() > 0:
        _Triples.apply(x)
    return x * 1


def _written_beside_a_branch(x):
    x = x * 2 if x.sum() > 0 else x * 4
    view = x[0]
    _Triples.apply(x)
    return x * view


@pytest.mark.parametrize("f", [_written_in_a_branch, _written_beside_a_branch])
def test_writes_to_an_argument_where_lanes_part(f):
    xs = torch.randn(6, 3, 2, dtype=torch.float64)
    given, looped = xs.clone(), xs.clone()
    assert torch.equal(lanewise.vmap(f)(given), torch.stack([f(x) for x in looped]))
    assert torch.equal(given, looped)

    def slope(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad((f(x * 1) ** 2).sum(), x)[0]

    want = torch.stack([slope(x) for x in xs])
    torch.testing.assert_close(lanewise.vmap(lanewise.grad(lambda x: (f(x * 1) ** 2).sum()))(xs), want)
    torch.testing.assert_close(lanewise.grad(lambda xs: (lanewise.vmap(f)(xs * 1) ** 2).sum())(xs), want)


class _Signed(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.negative = bool(x.sum() < 0)
        ctx.save_for_backward(x)
        return x * 2 if ctx.negative else x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 5 if ctx.negative else g * 3 * x.cos()


@pytest.mark.filterwarnings("ignore:.*once per lane:lanewise.errors.SlowPathWarning")
def test_a_number_on_ctx_that_lanes_around_share_in_some_lanes_alone():
    xs = torch.tensor([[1.0, -1.0, 2.0], [1.0, 2.0, -3.0]], dtype=torch.float64)[..., None]
    for _ in range(3):
        assert_same(vmap(vmap(_Signed.apply))(xs), torch.where(xs < 0, xs * 2, xs.sin()))
        slopes = vmap(vmap(grad(lambda x: _Signed.apply(x).sum())))(xs)
        assert_same(slopes, torch.where(xs < 0, 5.0, 3 * xs.cos()))
        deep = vmap(vmap(vmap(grad(lambda x: _Signed.apply(x).sum()))))(torch.stack([xs, xs.flip(1)]))
        assert_same(deep, torch.stack([slopes, slopes.flip(1)]))


@pytest.mark.filterwarnings("ignore:.*once per lane:lanewise.errors.SlowPathWarning")
def test_a_forward_that_runs_once_per_lane_pays_for_no_kernels_in_python():
    seen = []

    class Rooted(Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(tls_is_included(FACTORY_KEY) or tls_is_included(OUTSIDE_KEY))
            return x.sqrt() if x.sum() > 0 else x

        @staticmethod
        def backward(ctx, g):
            return g

    xs = torch.tensor([[4.0], [-1.0], [9.0]])
    assert_same(vmap(Rooted.apply)(xs), torch.tensor([[2.0], [-1.0], [3.0]]))
    assert seen[-3:] == [False] * 3
