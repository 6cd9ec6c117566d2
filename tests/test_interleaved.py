"""What is a view in a loop is one in lanes, wherever these lie in memory: writes to either, against the loop.

Values of all, those of the caller's tensors included; and errors where a loop has them.
"""

import gc
import itertools
import random
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lanewise import functional_call, grad, jacfwd, jacrev, jvp, stack_module_state, vmap
from lanewise._core.parting.interleaved import can_view, in_front, lanes_in_front
from lanewise._core.parting.rows import all_pairs
from lanewise._transforms.parting import parted
from lanewise.errors import TransformError

RESHAPES = {
    "reshape": lambda x: x.reshape(-1),
    "torch.reshape": lambda x: torch.reshape(x, (x.numel(),)),
    "reshape_as": lambda x: x.reshape_as(torch.empty(x.numel())),
    "reshape of a part": lambda x: x.reshape(x.shape[0], 1, -1),
    "flatten": lambda x: x.flatten(),
    "nn.Flatten": lambda x: nn.Flatten(0)(x),
    "unflatten": lambda x: x.flatten().unflatten(0, (2, -1)),
    "ravel": lambda x: x.ravel(),
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to(memory_format=torch.contiguous_format),
    "view": lambda x: x.view(-1),
    "view_as": lambda x: x.view_as(torch.empty(x.numel())),
    "view of bits": lambda x: x.view(torch.int32).view(torch.float64),
    "view_as_complex": lambda x: torch.view_as_real(torch.view_as_complex(x)) if x.shape[-1] == 2 else x,
}
BASES = {
    "argument": lambda x: x,
    "transposed argument": lambda x: x.mT,
    "computed": lambda x: x * 2,
    "computed by two": lambda x: x.exp().sin(),
    "transposed": lambda x: (x * 2).mT,
    "computed of transposed": lambda x: (x.mT * 2).mT,
    "rows": lambda x: (x * 2)[1:],
    "column": lambda x: (x * 2)[:, 0],
    "written to": lambda x: torch.zeros_like(x).add_(x),
    "reduced": lambda x: torch.stack([x, x]).sum(0),
}


def to_base(base, out):
    base += 1


def to_result(base, out):
    out.mul_(3)


def to_part_of_base(base, out):
    base[0].add_(1)


def to_part_of_result(base, out):
    out[0] = 7.0


def to_view_of_result(base, out):
    out.flatten()[:1].fill_(4.0)


def by_out(base, out):
    torch.mul(out, 2, out=out)


WRITES = (to_base, to_result, to_part_of_base, to_part_of_result, to_view_of_result, by_out)


def program(base, reshape, write):
    def f(x):
        made = BASES[base](x)
        out = RESHAPES[reshape](made)
        write(made, out)
        return made * 1.0, out * 1.0, x * 1.0

    return f


def loop(f, dim):
    """`vmap(f, dim)`, one example after the other."""

    def run(*xs):
        outs = [f(*[x.select(dim, place) for x in xs]) for place in range(xs[0].shape[dim])]
        return torch.stack(outs) if isinstance(outs[0], torch.Tensor) else [torch.stack(part) for part in zip(*outs)]

    return run


def outcome(run, x):
    """What a function gives, and what it leaves of a copy of its argument that lies as that does; or its error."""
    x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)
    try:
        out = run(x)
    except RuntimeError as error:
        return None, error
    return [*out, x] if isinstance(out, (list, tuple)) else [out, x], None


def check(mapped, looped, x):
    want, failed = outcome(looped, x)
    got, error = outcome(mapped, x)
    assert (failed is None) == (error is None), (failed, error)
    if want is not None:
        torch.testing.assert_close(got, want)


def forget():
    """No function is known to need lanes in front: each begins as it does at first."""
    lanes_in_front.clear()
    parted.clear()


@pytest.fixture(autouse=True)
def nothing_known():
    forget()


def numbers(*shape):
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape) / 20 - 0.3


LAYOUTS = {
    "in order": lambda x: x,
    "reversed": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "with gaps": lambda x: torch.stack([x, x], 2)[:, :, 0],
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("reshape", RESHAPES)
def test_writes(reshape, write):
    for base, dim, layout in itertools.product(BASES, (0, 1, -1), LAYOUTS):
        forget()
        f = program(base, reshape, write)
        for _ in range(2):  # the second time, it is known
            check(vmap(f, dim), loop(f, dim), LAYOUTS[layout](numbers(4, 2, 3) if dim < 0 else numbers(4, 3, 2)))


@pytest.mark.parametrize("write", WRITES)
def test_raw_strides_of_what_is_computed(write):
    # (torch leaves open what an operation gives that reads and writes elements which lie over one another.)
    size, strides = ((2, 2), (3, 1)) if write is by_out else ((2, 3), (2, 1))

    def f(x):
        base = x * 2
        out = base.as_strided(size, strides, 1)
        write(base, out.view(-1) if write is to_view_of_result else out)
        return base * 1, out * 1

    for dim, layout in itertools.product((0, 1), ("in order", "with gaps")):
        forget()
        check(vmap(f, dim), loop(f, dim), LAYOUTS[layout](numbers(4, 3, 2)))


SOME = ("reshape", "contiguous", "view", "unflatten", "view_as_complex")


@pytest.mark.parametrize("inner, outer", [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 1), (2, 2), (-1, -1)])
def test_nested(inner, outer):
    xs = numbers(4, 3, 2, 5)
    for base, reshape, write in itertools.product(BASES, SOME, WRITES):
        forget()
        f = program(base, reshape, write)
        check(vmap(vmap(f, inner), outer), loop(loop(f, inner), outer), xs)


def parting_before(f):
    def run(x):
        if x.sum() > 1:
            x = x * 1.5
        else:
            x = x - 1
        base, out, given = f(x)
        if out.sum() > 1:
            out = out + 1
        return base, out, given

    return run


def parting_around(f):
    def run(x):
        if x.sum() > 3:
            base, out, given = f(x)
        else:
            base, out, given = f(x)
            base = base + 1
        return base, out, given

    return run


@pytest.mark.parametrize("branch", [parting_before, parting_around])
def test_branches(branch):
    for base, reshape, write in itertools.product(BASES, SOME, WRITES):
        f = branch(program(base, reshape, write))
        forget()
        check(vmap(f, 1), loop(f, 1), numbers(4, 3, 2))
        for inner, outer in ((1, 1), (1, 0), (1, 2)):
            forget()
            check(vmap(vmap(f, inner), outer), loop(loop(f, inner), outer), numbers(4, 3, 2, 5))


def loss(f):
    def run(x):
        base, out, given = f(x * 1)
        weights = torch.linspace(1, 2, base.numel(), dtype=base.dtype).reshape(base.shape)
        return (base * weights).sin().sum() + (out * out).sum() + (given * given).sum()

    return run


def slope(f):
    def run(x):
        x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        return torch.autograd.grad(f(x), x)[0]

    return run


def jacobian(f):
    return lambda x: torch.autograd.functional.jacobian(f, x)


def along(f):
    """The derivative along the cosine, from the Jacobian."""
    return lambda x: (jacobian(f)(x) * x.cos()).flatten(-x.dim()).sum(-1)


def along_cosine(f):
    return lambda x: jvp(f, (x,), (x.cos(),))[1]


def total(f):
    return lambda x: f(x).sum()


DERIVATIVES = {
    "grad in vmap": (lambda f: vmap(grad(f), 1), lambda f: loop(slope(f), 1)),
    "vmap in grad": (lambda f: grad(total(vmap(f, 1))), lambda f: slope(total(loop(f, 1)))),
    "jvp in vmap": (lambda f: vmap(along_cosine(f), 1), lambda f: loop(along(f), 1)),
    "vmap in jvp": (lambda f: along_cosine(vmap(f, 1)), lambda f: along(loop(f, 1))),
    "jacrev in vmap": (lambda f: vmap(jacrev(f), 1), lambda f: loop(jacobian(f), 1)),
    "vmap in jacrev": (lambda f: jacrev(vmap(f, 1)), lambda f: jacobian(loop(f, 1))),
    "jacfwd in vmap": (lambda f: vmap(jacfwd(f), 1), lambda f: loop(jacobian(f), 1)),
    "vmap in jacfwd": (lambda f: jacfwd(vmap(f, 1)), lambda f: jacobian(loop(f, 1))),
    "outside": (lambda f: slope(total(vmap(f, 1))), lambda f: slope(total(loop(f, 1)))),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name):
    mapped, looped = DERIVATIVES[name]
    for base, reshape, write in itertools.product(BASES, ("reshape", "contiguous", "view"), WRITES[:-1]):
        f = loss(program(base, reshape, write))
        forget()
        check(mapped(f), looped(f), numbers(4, 3, 2))


def test_arguments_of_a_nested_vmap_keep_their_gaps():
    def f(x):
        base = x.clone()
        x.reshape(-1)[:1].fill_(0.3)  # a copy
        base.reshape(-1)[:1].fill_(0.3)
        return base, x * 1

    check(vmap(vmap(f, 2), 1), loop(loop(f, 2), 1), numbers(3, 4, 2, 2))


COMPUTED = (
    lambda x, y: x * 1.5,
    lambda x, y: x.sin(),
    lambda x, y: x + y if x.shape == y.shape else x + 1,
    lambda x, y: x @ x.mT if x.dim() == 2 else x * 2,
    lambda x, y: torch.where(x > 0, x, y) if x.shape == y.shape else x.abs(),
    lambda x, y: x.sum(-1, keepdim=True) + x if x.dim() else x + 1,
    lambda x, y: torch.zeros_like(x).add_(x),
    lambda x, y: torch.zeros(x.shape, dtype=x.dtype).copy_(x),
    lambda x, y: x.clone(),
)
VIEWED = (
    lambda x: x.mT if x.dim() >= 2 else x,
    lambda x: x[0] if x.dim() else x,
    lambda x: x[:, -1] if x.dim() >= 2 else x,
    lambda x: x[1:] if x.dim() and x.shape[0] > 1 else x,
    lambda x: x.reshape(-1),
    lambda x: x.reshape(2, -1) if x.numel() % 2 == 0 else x.reshape(1, -1),
    lambda x: x.reshape(x.shape[::-1]),
    lambda x: x.contiguous(),
    lambda x: x.view(-1) if x.dim() == 1 else x.ravel(),
    lambda x: x.unsqueeze(0) if x.dim() < 4 else x,
    lambda x: x.diagonal() if x.dim() >= 2 else x,
)
WRITTEN = (
    lambda x, y: x.add_(0.5),
    lambda x, y: x.__setitem__(0, 0.7) if x.dim() else None,
    lambda x, y: x.__setitem__((slice(None), 0), x[:, -1] * 2) if x.dim() >= 2 else None,
    lambda x, y: x.copy_(y * 2) if x.shape == y.shape else None,
    lambda x, y: x.reshape(-1)[:1].fill_(0.3),
    lambda x, y: x.masked_fill_(x > 1.5, 0.2),
    lambda x, y: x.clamp_(-2, 2),
)


def random_program(chosen, branches):
    """A function of one example: values, views of them, and writes to either."""
    steps = []
    for _ in range(chosen.randrange(4, 16)):
        kind = chosen.choices(["computed", "viewed", "written", "branch"], [30, 35, 30, 5 * branches])[0]
        table = {"computed": COMPUTED, "viewed": VIEWED, "written": WRITTEN, "branch": (None,)}[kind]
        steps.append((kind, chosen.choice(table), chosen.random(), chosen.random()))

    def f(x):
        values = [x]
        for kind, run, first, second in steps:
            x, y = values[-1 - int(first * min(len(values), 4))], values[int(second * len(values))]
            if kind == "branch":
                if x.sum() > 1:
                    x = x + 1
                else:
                    x = x * 2
                values.append(x)
            elif kind == "written":
                run(x, y)
            else:
                values.append(run(x, y) if kind == "computed" else run(x))
        return [value * 1 for value in values]

    return f


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("start", [0, 100, 200])
def test_random_programs(start, depth, branches):
    for seed in range(start, start + 100):
        chosen = random.Random(seed)
        f = random_program(chosen, branches)
        shape = (3, 4, 2, 2)[: 2 + depth]
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        order = chosen.sample(range(x.dim()), x.dim())
        x = x.permute(order).contiguous().permute(sorted(range(x.dim()), key=order.__getitem__))
        mapped = looped = f
        for _ in range(depth):
            dim = chosen.randrange(3)
            mapped, looped = vmap(mapped, dim), loop(looped, dim)
        forget()
        check(mapped, looped, x)


# --- what else is around ---------------------------------------------------------------------------------------------


def written(x, scale=2.0):
    base = x * scale
    out = base.reshape(-1)
    out += 1
    return base


def test_reading_alone_is_no_reason_to_begin_again():
    runs = []

    def f(x):
        runs.append(None)
        base = x * 2
        out = base.reshape(-1) + base.contiguous().sum()
        del base
        return out.view(-1)

    xs = numbers(4, 3, 2)
    torch.testing.assert_close(vmap(f, 1)(xs), loop(lambda x: (x * 2).flatten() + (x * 2).sum(), 1)(xs))
    assert len(runs) == 1 and not lanes_in_front
    base_is_gone = vmap(lambda x: (x * 2).reshape(-1).add_(1), 1)
    torch.testing.assert_close(base_is_gone(xs), loop(lambda x: x.flatten() * 2 + 1, 1)(xs))
    assert not lanes_in_front
    torch.testing.assert_close(vmap(written, 0)(xs), loop(written, 0)(xs))
    assert not lanes_in_front


def test_what_the_function_did_before_is_undone():
    seen = []

    def f(x, y):
        seen.append(len(seen))
        y.mul_(2)
        base = x + torch.rand(4, 2)
        out = base.reshape(-1)
        out += 1
        x.add_(base)
        return base

    xs, ys = numbers(4, 3, 2), numbers(3)
    torch.manual_seed(0)
    noise = vmap(lambda y: torch.rand(4, 2), randomness="different")(ys)
    torch.manual_seed(0)
    got = vmap(f, (1, 0), randomness="different")(xs, ys)
    want = numbers(4, 3, 2).movedim(1, 0) + noise + 1
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(xs, numbers(4, 3, 2) + want.movedim(0, 1))
    torch.testing.assert_close(ys, numbers(3) * 2)
    assert seen == [0] and lanes_in_front


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_arguments(chunk_size):
    xs, scales = numbers(4, 3, 2), numbers(3)
    want = torch.stack([written(xs[:, i], scales[i]) for i in range(3)])
    torch.testing.assert_close(vmap(written, (1, 0), chunk_size=chunk_size)(xs, scales), want)
    forget()
    named = vmap(written, in_dims={"x": 1, "scale": 0}, chunk_size=chunk_size)
    torch.testing.assert_close(named(x=xs, scale=scales), want)
    forget()
    expanded = xs[:, :1].expand(4, 3, 2)
    torch.testing.assert_close(
        vmap(written, (1, 0), chunk_size=chunk_size)(expanded, scales)[1], written(xs[:, 0], scales[1])
    )


def test_one_tensor_for_two_arguments():
    def f(x, y):
        base = written(x)
        x.add_(base)
        return base, x * 1, y * 1

    xs, ys = numbers(4, 3, 2), numbers(4, 3, 2)
    torch.testing.assert_close([*vmap(f, 1)(xs, xs), xs], [*loop(f, 1)(ys, ys), ys])


def convolved(x, weight):
    out = F.conv2d(x, weight)
    flat = out.reshape(-1)
    out.mul_(2)
    normed = F.batch_norm(out, None, None, training=True)
    rows = normed.flatten(1)
    rows.add_(1)
    return out, flat, normed, rows


def test_lanes_that_a_rule_puts_elsewhere():
    x, weights = torch.randn(2, 3, 6, 6), torch.randn(5, 4, 3, 3, 3)
    want = [torch.stack(part) for part in zip(*[convolved(x, weight) for weight in weights])]
    for _ in range(2):
        torch.testing.assert_close(list(vmap(convolved, (None, 0))(x, weights)), want, rtol=1e-4, atol=1e-5)
    assert lanes_in_front


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4, track_running_stats=False)
        self.linear = nn.Linear(64, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        seen = self.norm(self.conv(x))
        return self.linear(self.relu(seen.flatten(1))) + seen.sum()


def test_ensembles():
    torch.manual_seed(0)
    nets, x = [Net().double() for _ in range(5)], torch.randn(2, 3, 6, 6, dtype=torch.float64)
    parameters, buffers = stack_module_state(nets)
    run = lambda parameters: functional_call(nets[0], (parameters, buffers), (x,))
    torch.testing.assert_close(vmap(run)(parameters), torch.stack([net(x) for net in nets]))
    slopes = grad(lambda parameters: vmap(run)(parameters).square().sum())(parameters)
    for net in nets:
        net(x).square().sum().backward()
    for name, found in slopes.items():
        want = torch.stack([dict(net.named_parameters())[name].grad for net in nets])
        torch.testing.assert_close(found, want, rtol=1e-8, atol=1e-8)


# --- custom Functions and hooks --------------------------------------------------------------------------------------


class Writes(torch.autograd.Function):
    """Its forward, or its backward, writes to a view."""

    @staticmethod
    def forward(ctx, x, forward):
        ctx.save_for_backward(x)
        return written(x) if forward else x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        base = grad * x
        out = base.reshape(-1)
        out += 1
        own = x.contiguous()
        return base + (own.mul_(2) if own is not x else own * 2), None


class Asks(Writes):
    """The same, once per lane."""

    @staticmethod
    def backward(ctx, grad):
        return (Writes.backward(ctx, grad)[0] if grad.sum().item() > -1e6 else grad), None


@pytest.mark.filterwarnings("ignore:.*performance drop")
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("kind", [Writes, Asks])
@pytest.mark.parametrize("name", ["grad in vmap", "vmap in grad", "jacrev in vmap", "vmap in jacrev", "outside"])
def test_custom_functions(name, kind, forward):
    mapped, looped = DERIVATIVES[name]
    for make in (
        lambda x: kind.apply(x, forward),
        lambda x: kind.apply(x.cos(), forward).sin(),
        lambda x: kind.apply((x * 1).mT, forward).mT * x,
    ):
        forget()
        f = total(make)
        check(mapped(f), looped(f), numbers(4, 3, 2))


def test_checkpoint():
    f = total(lambda x: torch.utils.checkpoint.checkpoint(written, x * 1, use_reentrant=False).sin())
    for name in ("grad in vmap", "vmap in grad", "outside"):
        mapped, looped = DERIVATIVES[name]
        forget()
        check(mapped(f), looped(f), numbers(4, 3, 2))


def test_in_a_hook_outside_of_the_vmap_it_raises():
    def f(x):
        made = x * 2
        made.register_hook(written)
        return (made * made).sum()

    xs = numbers(4, 3, 2)
    torch.testing.assert_close(vmap(grad(f), 1)(xs), loop(slope(f), 1)(xs))
    forget()
    with pytest.raises(TransformError) as caught:
        grad(total(vmap(f, 1)))(xs)
    assert str(caught.value).splitlines()[0] == (
        "vmap: a write in place to a tensor whose lanes lie interleaved in memory, or to a copy of it that `reshape` "
        "or `contiguous` has made, while the other is in use: in a loop, that copy is a view"
    )


LAID_OUT = {
    "masked_scatter": lambda x, y: x.masked_scatter(y > 0, y),
    "baddbmm": lambda x, y: torch.baddbmm(x[None], x[None], y[None]),
    "one_hot": lambda x, y: F.one_hot(y.argsort(0)),
    "mm": lambda x, y: x.mT @ y,
    "solve": lambda x, y: torch.linalg.solve(x + 9 * torch.eye(3), y),
    "cumsum": lambda x, y: x.cumsum(0),
    "gather": lambda x, y: x.gather(0, y.argsort(0)),
    "softmax": lambda x, y: x.softmax(0),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "stack": lambda x, y: torch.stack([x, y], 1).sum(1),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_results_lie_as_in_a_loop(name):
    def f(x, y):
        base = LAID_OUT[name](x, y)
        out = base.reshape(-1)
        out.mul_(2)
        return base * 1, out

    for turned, dims in itertools.product((False, True), [(0, 0), (1, 1), (2, 0)]):
        forget()
        rows = [numbers(4, 3, 3).sin(), numbers(4, 3, 3).cos()]
        if turned:
            rows = [each.mT.contiguous().mT for each in rows]
        args = [each.movedim(0, dim) if turned else each.movedim(0, dim).contiguous() for each, dim in zip(rows, dims)]
        want = [
            torch.stack(part) for part in zip(*[f(*each) for each in zip(*[a.unbind(d) for a, d in zip(args, dims)])])
        ]
        torch.testing.assert_close(list(vmap(f, dims)(*args)), want)


# --- pairs of lanes --------------------------------------------------------------------------------------------------

SIZES = [(1,), (4,), (2, 3), (4, 3), (3, 1, 2), (2, 3, 4), (2, 2, 2, 2)]


def layouts(first: int, *rest: int):
    """Tensors of a shape: in every order, with gaps of several widths, expanded."""
    shape = (first, *rest)
    for order in itertools.permutations(range(len(shape))):
        back = sorted(range(len(shape)), key=order.__getitem__)
        for gaps in itertools.product((0, 1, 2), repeat=len(shape)) if len(shape) < 4 else ((0,) * 5, (1,) * 5):
            for step in (1, 2, 3):
                sizes = [shape[dim] + gap for dim, gap in zip(order, gaps)]
                wide = torch.arange(step * torch.Size(sizes).numel()).reshape(*sizes, step)[..., 0]
                yield wide[tuple([slice(shape[dim]) for dim in order])].permute(back)
    yield torch.arange(first).reshape(-1, *[1 for _ in rest]).expand(shape)


def sizes_for(x):
    yield [-1]
    yield [x.numel()]
    yield list(x.shape)
    yield [*x.shape, 1]
    for dim in range(x.dim() - 1):
        yield [*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]]
    for part in (2, 3, 4):
        if x.numel() % part == 0:
            yield [part, -1]
            yield [x.numel() // part, 1, part]


def has_view(x, size):
    try:
        x.view(size)
    except RuntimeError:
        return False
    return True


def test_which_tensors_have_views():
    for shape in SIZES:
        for x in layouts(*shape):
            for size in sizes_for(x):
                assert can_view(x.shape, x.stride(), size) == has_view(x, size), (x.shape, x.stride(), size)
    scalar = torch.zeros(())
    assert can_view(scalar.shape, scalar.stride(), [1, 1])


def test_pairs_of_lanes_have_the_views_of_an_example():
    for shape in [(2, 3), (3, 2, 4), (2, 3, 2, 3), (2, 3, 3, 1, 2)]:
        for x, front in itertools.product(layouts(*shape), (False, True)):
            pairs = all_pairs(x, x.stride()[2:], front)
            assert torch.equal(pairs, x.flatten(0, 1))
            assert in_front(pairs) or not front or 0 in x.stride()
            one, example = pairs[0], x[0, 0]
            assert one.is_contiguous() == example.is_contiguous()
            for size in sizes_for(example):
                assert has_view(one, size) == has_view(example, size), (x.shape, x.stride(), pairs.stride(), size)
    assert all_pairs(torch.zeros(0, 3, 2), (1,), False).shape == (0, 2)


def test_no_memory_is_kept():
    def f(x):
        base = x * 2
        pending = base.mT.contiguous()
        out = base.reshape(-1)
        return pending.sum() + out.sum() + written(x).sum()

    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            xs = numbers(4, 3, 2)
            kept = weakref.ref(xs)
            vmap(f, 1)(xs)
            del xs
            assert kept() is None
    finally:
        gc.enable()
