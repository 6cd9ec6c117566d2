"""`debug.print` prints what a loop over the lanes prints, however often code runs again."""

import contextlib
import io
from collections import Counter

import pytest
import torch

import lanewise
from lanewise import debug, grad, hessian, jacfwd, jacrev, jvp, vmap

XS = torch.tensor([3.0, -0.5, 5.0, 12.0, 1.0])


def branch(x):
    debug.print("in {}", x)
    if x > 0:
        debug.print("pos {}", x)
    else:
        debug.print("neg {}", x)
    debug.print("out {}", x)
    return x * 2


def loop(x):
    while x > 1:
        x = x / 2
        debug.print("now {:.2f}", x)
    return x


def key(x):
    debug.print("a {}", x)
    name = {3: "three", 5: "five"}.get(int(x), "other")
    debug.print("{} {}", name, x)
    return x


def ways_of_their_own(x):
    debug.print("a {}", x)
    found = sorted([x.item(), 1.5])
    debug.print("sorted {}", found)
    return x


def called_by_a_library(x):
    debug.print("a {}", x)
    nearest = max([1.0, 2.0], key=lambda v: abs(v - (x if x > 1 else x * 2)))
    debug.print("nearest {}", nearest)
    return x


def caught(x):
    debug.print("a {}", x)
    try:
        if x > 2:
            raise ValueError("large")
        debug.print("small {}", x)
    except ValueError as error:
        debug.print("caught {} {}", x, str(error))
    return x


def recursive(x, n=3):
    debug.print("x {} n {}", x, n)
    if n and x > n:
        return recursive(x - 1, n - 1)
    return x


def nested(x):
    def product(y):
        debug.print("y {} x {}", y, x)
        return y * x if y > x else y

    debug.print("x {}", x)
    z = vmap(product)(torch.tensor([0.0, 2.0, 4.0]))
    debug.print("z {}", z)
    if x > 2:
        z = vmap(product)(z)
    return z.sum()


def nothing_of_a_lane(x):
    debug.print("here")
    return x if x > 0 else -x


def inner_gradient(x):
    def square(z):
        debug.print("z {}", z)
        return z * z if x > 2 else z

    return grad(square)(x)


def structure(x):
    debug.print("{d} {d[a]}", d={"a": x, "b": [x.item(), 3]})
    return x if x > 2 else -x


FUNCTIONS = [
    branch,
    loop,
    key,
    ways_of_their_own,
    called_by_a_library,
    caught,
    recursive,
    nested,
    nothing_of_a_lane,
    inner_gradient,
    structure,
]

# How often each lane runs, and how.
WAYS = {
    "vmap": (1, lambda f: vmap(f)(XS)),
    "chunks": (1, lambda f: vmap(f, chunk_size=2)(XS)),
    "grad(vmap)": (1, lambda f: grad(lambda xs: vmap(f)(xs).sum())(XS)),
    "vmap(grad)": (1, lambda f: vmap(grad(f))(XS)),
    "vmap(jvp)": (1, lambda f: vmap(lambda x: jvp(f, (x,), (x,)))(XS)),
    "vmap(jacrev)": (1, lambda f: vmap(jacrev(f))(XS)),
    "vmap(jacfwd)": (1, lambda f: vmap(jacfwd(f))(XS)),
    "vmap(hessian)": (1, lambda f: vmap(hessian(f))(XS)),
    "vmap(vmap)": (1, lambda f: vmap(vmap(f))(XS[None])),
    "pairs": (2, lambda f: vmap(lambda x: vmap(f)(x.expand(2)))(XS)),
    "pairs in a branch": (2, lambda f: vmap(lambda x: vmap(f)(x.expand(2)) if x > 1 else vmap(f)(x.repeat(2)))(XS)),
}


def without_source(f):
    """The function, of code that cannot be converted."""
    return type(f)(_nowhere(f.__code__), f.__globals__, f.__name__, f.__defaults__, f.__closure__)


def _nowhere(code):
    consts = tuple(_nowhere(const) if isinstance(const, type(code)) else const for const in code.co_consts)
    # (Code of another file is the same code, but not of another line.)
    return code.replace(co_filename="<nowhere>", co_firstlineno=code.co_firstlineno + 10_000, co_consts=consts)


def printed(run):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        run()
    return text.getvalue().splitlines()


def looped(f):
    return printed(lambda: [f(x) for x in XS])


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("source", ["source", "no source"])
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_lines_of_a_loop(f, source, way):
    times, run = WAYS[way]
    g = f if source == "source" else without_source(f)
    wanted = Counter(looped(f) * times)
    assert Counter(printed(lambda: run(g))) == wanted
    assert Counter(printed(lambda: run(g))) == wanted  # from the start with lanes that part


def test_each_call_prints_in_the_order_of_the_lanes():
    g = without_source(branch)
    for _ in range(2):
        assert printed(lambda: vmap(branch)(XS[:3])) == [
            *["in 3.0", "in -0.5", "in 5.0"],
            *["pos 3.0", "pos 5.0", "neg -0.5"],
            *["out 3.0", "out -0.5", "out 5.0"],
        ]
        # Run again as a whole for the lane that was left behind, whose first line has its place already.
        assert printed(lambda: vmap(g)(XS[:3])) == [
            *["in 3.0", "in -0.5", "in 5.0"],
            *["pos 3.0", "pos 5.0", "out 3.0", "out 5.0"],
            *["neg -0.5", "out -0.5"],
        ]


def test_lines_come_out_after_each_chunk():
    seen = []

    def f(x):
        debug.print("x {}", x)
        seen.append(text.getvalue())
        return x

    with contextlib.redirect_stdout(io.StringIO()) as text:
        vmap(f, chunk_size=2)(XS[:4])
    assert seen == ["", "x 3.0\nx -0.5\n"]
    assert text.getvalue() == "x 3.0\nx -0.5\nx 5.0\nx 12.0\n"


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("source", ["source", "no source"])
def test_an_error_does_not_keep_lines_back(kind, source):
    def f(x):
        debug.print("x {}", x)
        if x < 0:
            debug.print("neg {}", x)
            raise kind
        return x

    g = f if source == "source" else without_source(f)

    def run():
        with pytest.raises(kind):
            vmap(lambda x: vmap(g)(x[None]))(XS[:3])

    for _ in range(2):
        assert printed(run) == ["x 3.0", "x -0.5", "x 5.0", "neg -0.5"]
    assert printed(lambda: vmap(g)(XS[2:])) == ["x 5.0", "x 12.0", "x 1.0"]


def test_no_lanes_print_nothing():
    assert printed(lambda: vmap(branch)(XS[:0])) == []
    assert printed(lambda: vmap(nothing_of_a_lane)(XS[:0])) == []


def test_operators():
    def chosen(x):
        return lanewise.cond(
            x > 0, lambda x: (debug.print("t {}", x), x)[1], lambda x: (debug.print("f {}", x), -x)[1], (x,)
        )

    def halved(x):
        return lanewise.while_loop(lambda x: x > 1, lambda x: (debug.print("w {}", x), x / 2)[1], x)

    def added(x):
        return lanewise.scan(lambda c, a: ((debug.print("s {} {}", c, a), c + a)[1], c), x, torch.arange(2.0))[0]

    for f in (chosen, halved, added):
        assert Counter(printed(lambda f=f: vmap(f)(XS))) == Counter(looped(f))


def test_a_backward_pass():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            debug.print("forward {}", x)
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            debug.print("backward {} {}", g, *ctx.saved_tensors)
            return g * 2

    def f(x):
        y = Double.apply(x) if x > 0 else x * 3
        y.register_hook(lambda g: debug.print("hook {} {}", g, "pos" if g > 1 else "neg"))
        return y * y

    wanted = Counter(printed(lambda: [grad(f)(x) for x in XS]))
    assert Counter(printed(lambda: vmap(grad(f))(XS))) == wanted
    assert Counter(printed(lambda: grad(lambda xs: vmap(f)(xs).sum())(XS))) == wanted
