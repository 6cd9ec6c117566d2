"""What operations write: into lists of tensors, into `out=`, of which dtype; numbers that torch takes of tensors."""

import math
import sys

import pytest
import torch

from lanewise import grad, jvp, linearize, vmap
from tests.oracles import assert_same
from tests.plain import NESTINGS, assert_as_plain

DOUBLE = torch.float64
APART = "result type .* can't be cast to the desired output type"


def tensors(x):
    return [x * 1, x.cos()]


def written(call):
    """A function of x by what `call` does to a list of two tensors."""

    def f(x):
        pair = tensors(x)
        call(pair, x)
        return pair[0] * pair[1] + x

    return f


def made_inside(call):
    def f(x):
        pair = [torch.ones(3, dtype=x.dtype), torch.full((3,), 2.0, dtype=x.dtype)]
        call(pair, x)
        return pair[0] * pair[1] + x

    return f


ON_LISTS = {
    "add": written(lambda pair, x: torch._foreach_add_(pair, [x, x * x], alpha=0.3)),
    "mul, made inside": made_inside(lambda pair, x: torch._foreach_mul_(pair, [x, x.sin()])),
    "a number for each": written(lambda pair, x: torch._foreach_mul_(pair, [2.0, 3.0])),
    "one 0-dim tensor": written(lambda pair, x: torch._foreach_add_(pair, x[0])),
    "one 0-dim tensor, made inside": made_inside(lambda pair, x: torch._foreach_mul_(pair, x[0])),
    "maximum": written(lambda pair, x: torch._foreach_maximum_(pair, [x.flip(0), x * x])),
    "clamp_max with a number": written(lambda pair, x: torch._foreach_clamp_max_(pair, 0.8)),
    "clamp_min": written(lambda pair, x: torch._foreach_clamp_min_(pair, [x.flip(0), x * x])),
    "lerp": written(lambda pair, x: torch._foreach_lerp_(pair, [x.sin(), x], 0.25)),
    "addcmul": written(lambda pair, x: torch._foreach_addcmul_(pair, [x, x], [x.cos(), x], 0.5)),
    "addcdiv": made_inside(lambda pair, x: torch._foreach_addcdiv_(pair, [x, x], [x + 1, x + 2], [0.5, 2.0])),
    "sqrt": written(lambda pair, x: torch._foreach_sqrt_(pair)),
    "views": written(lambda pair, x: torch._foreach_mul_([pair[0][:2], pair[1][1:]], [x[:2], x[1:]])),
    "not in place": written(
        lambda pair, x: pair.insert(0, sum(torch._foreach_div(torch._foreach_pow(pair, 2), [x, x])))
    ),
}


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("name", ON_LISTS)
def test_lists(name, nesting):
    assert_as_plain(ON_LISTS[name], nesting, 3)


def test_lists_without_a_derivative_in_torch():
    f = written(lambda pair, x: torch._foreach_copy_(pair, [x, x.sin()]))
    x = torch.rand(3, dtype=DOUBLE)
    assert_same(jvp(f, (x,), (x,)), jvp(lambda x: x * x.sin() + x, (x,), (x,)))
    f = made_inside(lambda pair, x: (torch._foreach_add_(pair, [x, x]), torch._foreach_zero_(pair[:1])))
    assert_same(jvp(f, (x,), (x,)), (x, x))


WRONG_DTYPE = {
    "out=": lambda m, x: torch.add(x, 1, out=m),
    "out= of a reduction": lambda m, x: torch.mean(x.expand(2, 3), 0, out=m),
    "out= of two": lambda m, x: torch.sort(x, out=(m, torch.empty(3, dtype=torch.int64))),
    "in place": lambda m, x: m.addcmul_(x, x),
    "a product in place": lambda m, x: m.addmv_(torch.outer(x, x), x),
    "a list": lambda m, x: torch._foreach_mul_([m], [x]),
}


@pytest.mark.parametrize("name", WRONG_DTYPE)
def test_whole_numbers_take_no_floats(name):
    """As outside, where the text is that of the operation."""

    def f(x):
        m = torch.ones(3, dtype=torch.int64)
        WRONG_DTYPE[name](m, x)
        return m * x

    xs = torch.rand(2, 3)
    with pytest.raises(RuntimeError):
        f(xs[0])
    for run in (lambda: vmap(f)(xs), lambda: jvp(f, (xs[0],), (xs[0],)), lambda: jvp(vmap(f), (xs,), (xs,))):
        with pytest.raises(
            RuntimeError,
            match=f"{APART}|must have the same dtype|Expected out tensor|infer output dtype|Bad in-place call",
        ):
            run()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.complex128])
@pytest.mark.parametrize("reduce", [torch.sum, torch.cumsum, torch.prod, torch.cumprod, torch.nansum])
def test_reductions_compute_in_the_dtype_of_out(reduce, dtype):
    def f(x):
        m = torch.empty(3, dtype=dtype)
        reduce(x.expand(4, 3), 0, out=m) if reduce not in (torch.cumsum, torch.cumprod) else reduce(x, 0, out=m)
        return m

    if reduce is torch.nansum and dtype.is_complex:
        pytest.skip("torch has none of complex numbers")
    xs = torch.rand(3, 3, dtype=DOUBLE) * 3
    if reduce is torch.nansum and dtype is torch.int64:
        xs = xs.long()
    assert_same(vmap(f)(xs), torch.stack([f(x) for x in xs]))


# name -> (what grows, the same without)
RESIZED = {
    "out= of another shape": (lambda x: torch.mul(x, x, out=torch.empty(0, dtype=DOUBLE)) * x, lambda x: x**3),
    "out= of fewer elements": (
        lambda x: torch.outer(x, x, out=torch.empty(3, dtype=DOUBLE)) @ x,
        lambda x: torch.outer(x, x) @ x,
    ),
    "resize_": (lambda x: torch.empty(0, dtype=DOUBLE).resize_(3).copy_(x) * x, lambda x: x * x),
    "resize_ of a constant": (lambda x: torch.empty(0, dtype=DOUBLE).resize_(3).fill_(2) * x, lambda x: 2 * x),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", RESIZED)
def test_what_grows(name):
    f, same = RESIZED[name]
    xs = torch.rand(2, 3, dtype=DOUBLE)
    assert_same(vmap(f)(xs), torch.stack([f(x) for x in xs]))
    want = jvp(vmap(same), (xs,), (xs,))
    assert_same(jvp(vmap(f), (xs,), (xs,)), want)
    assert_same(vmap(lambda x: jvp(f, (x,), (x,)))(xs), want)
    assert_same(linearize(f, xs[0])[1](xs[0]), want[1][0])


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool, torch.complex64])
def test_one_value_where_a_mask_of_each_lane_is_true(dtype):
    """torch fills, and converts."""

    def f(x):
        m = torch.zeros(3, dtype=dtype)
        m[x > 0.5] = x[0] * 7
        m[x > 0.8] = x[1:2]
        return m

    xs = torch.rand(5, 3, dtype=DOUBLE)
    assert_same(vmap(f)(xs), torch.stack([f(x) for x in xs]))


NUMBERS = {
    "alpha": lambda x, t: torch.add(x, x, alpha=t),
    "beta": lambda x, t: torch.addmv(x, torch.outer(x, x), x, beta=t),
    "a bound": lambda x, t: x.clamp(t, 2.0),
    "a slope": lambda x, t: torch.nn.functional.leaky_relu(x, t),
    "a value": lambda x, t: torch.full((3,), t) * x,
    "of a list": lambda x, t: torch._foreach_pow([x], t)[0],
}
FLOATS = {
    "eps": lambda x, t: torch.nn.functional.layer_norm(x, (3,), eps=t),
    "delta": lambda x, t: torch.nn.functional.huber_loss(x, x + 1, delta=t),
    "padding": lambda x, t: torch.nn.functional.pad(x, (1, 1), value=t),
    "of a function": lambda x, t: torch.logit(x.sigmoid(), t),
    "by name": lambda x, t: torch.logit(x.sigmoid(), eps=t),
    "unpacked": lambda x, t: torch.logit(*(x.sigmoid(), t)),
    "unpacked by name": lambda x, t: torch.logit(x.sigmoid(), **{"eps": t}),
    "of a method": lambda x, t: x.logit(t),
    "of a result's method": lambda x, t: (x + 1).sigmoid().logit(t),
    "over lines": lambda x, t: (
        x
        .sigmoid()
        .logit(
            t
        )
    ),
    "kept": lambda x, t: torch.nn.LayerNorm(3, eps=t, dtype=DOUBLE)(x),
}  # fmt: skip
if sys.version_info >= (3, 11):  # where the code of a frame says what it calls
    NUMBERS |= FLOATS


@pytest.mark.parametrize("name", NUMBERS)
def test_a_tensor_taken_as_a_number_keeps_its_derivative_or_raises(name):
    """As torch.autograd does outside; `detach` says that it is a constant."""
    f = lambda x: NUMBERS[name](x, x[0] + 0.1).sum()
    x = torch.rand(3, dtype=DOUBLE)
    with pytest.raises(TypeError):
        f(x.clone().requires_grad_())
    for run in (
        lambda: jvp(f, (x,), (x,)),
        lambda: jvp(vmap(f), (x[None],), (x[None],)),
        lambda: vmap(lambda x: jvp(f, (x,), (x,)))(torch.stack([x, x])),
        lambda: grad(f)(x),
        lambda: grad(lambda xs: vmap(f)(xs).sum())(x[None]),
        lambda: vmap(f)(x[None].requires_grad_()),
    ):
        with pytest.raises(TypeError):
            run()
    constant = lambda x: NUMBERS[name](x, x[0].detach() + 0.1).sum()
    assert_same(jvp(constant, (x,), (x,))[1], (torch.func.grad(constant)(x) * x).sum())


def test_the_text_of_a_tensor_taken_as_a_number():
    x = torch.rand(3)
    with pytest.raises(TypeError) as caught:
        jvp(lambda x: torch.add(x, x, alpha=x[0]), (x,), (x,))
    assert str(caught.value).splitlines()[0] == (
        "the argument must be Number, not Tensor: a tensor that has a derivative, which would be lost"
    )
    assert "alpha=t.detach()" in str(caught.value)


def test_the_text_of_a_tensor_taken_as_a_float():
    if sys.version_info < (3, 11):
        pytest.skip("a constant there")
    x = torch.rand(3)
    with pytest.raises(TypeError) as caught:
        jvp(lambda x: torch.nn.functional.layer_norm(x, (3,), eps=x[0]), (x,), (x,))
    first, _, *instead = str(caught.value).splitlines()
    assert first == (
        "layer_norm(): argument 'eps' must be float, not Tensor: a tensor that has a derivative, which would be lost"
    )
    assert instead == [
        "Write instead:",
        "  t.detach()  # or float(t), where it is meant to be a constant",
        "  or write the formula with operations that take a tensor there",
    ]


CONSTANTS = {
    "float": lambda x, t: x * float(t),
    "math.sqrt": lambda x, t: x * math.sqrt(t),
    "map": lambda x, t: x * next(iter(map(float, [t]))),
    "in the call": lambda x, t: torch.nn.functional.layer_norm(x, (3,), eps=float(t)),
    "text": lambda x, t: x * len(f"{float(t):.3f}"),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_float_that_the_function_asks_for_is_a_constant(name):
    x = torch.rand(3, dtype=DOUBLE)
    f = lambda x: CONSTANTS[name](x, x[0] + 0.1).sum()
    fixed = lambda y: CONSTANTS[name](y, x[0] + 0.1).sum()
    want = jvp(fixed, (x,), (x,))
    assert_same(jvp(f, (x,), (x,)), want)
    assert_same(vmap(lambda x: jvp(f, (x,), (x,)))(x[None]), tuple(t[None] for t in want))
    assert_same(grad(lambda xs: vmap(f)(xs).sum())(x[None])[0], grad(fixed)(x))
