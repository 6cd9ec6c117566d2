"""Inside torch.compile the transforms are torch's own, with the same values; outside, nothing of that happens."""

import subprocess
import sys

import pytest
import torch

import lanewise as lw
from lanewise._transforms import compiling
from lanewise.errors import TransformError

D = torch.float64
X = torch.randn(4, 3, dtype=D, generator=torch.Generator().manual_seed(0))
V = X[0].clone()


def f(t):
    return (t.sin() @ torch.ones(3, dtype=D)) ** 2


# Each takes X or a row of it.
PROGRAMS = {
    "vmap(grad)": (lw.vmap(lw.grad(f)), X),
    "vmap(grad) made inside": (lambda a: lw.vmap(lw.grad(f))(a), X),
    "chunks": (lw.vmap(torch.sin, chunk_size=2), X),
    "in_dims": (lw.vmap(torch.dot, in_dims=(1, None)), (X, X[:, 0])),
    "value_and_grad": (lw.value_and_grad(f), V),
    "grad_and_value": (lw.grad_and_value(f), V),
    "vjp": (lambda a: lw.vjp(torch.sin, a)[1](a), V),
    "jvp": (lambda a: lw.jvp(torch.sin, (a,), (a,)), V),
    "jacrev": (lw.jacrev(torch.sin), V),
    "jacrev with a keyword": (lambda a: lw.jacrev(lambda x, k: k * x)(a, k=a), V),
    "jacfwd": (lw.jacfwd(torch.sin), V),
    "hessian": (lw.hessian(f), V),
    "hessian made inside": (lambda a: lw.hessian(f)(a), V),
    "vmap(hessian)": (lw.vmap(lw.hessian(f)), X),
}


# Tracing is the same for every backend; the second one also runs torch's autograd on the graph.
RUNS = [(name, "eager") for name in PROGRAMS] + [(name, "aot_eager") for name in ("vmap(grad)", "vjp", "vmap(hessian)")]


@pytest.mark.parametrize(("name", "backend"), RUNS)
def test_compiled_values(name, backend):
    program, args = PROGRAMS[name]
    args = args if isinstance(args, tuple) else (args,)
    torch._dynamo.reset()
    want = program(*args)
    got = torch.compile(program, backend=backend, fullgraph=True)(*args)
    torch.testing.assert_close(got, want)


DECIDES = {
    "if": lambda a: a * 2 if a.sum() > 0 else a - 1,
    "item": lambda a: a * a.sum().item(),
    "cond": lambda a: lw.cond(a.sum() > 0, lambda b: b * 2, lambda b: b - 1, (a,)),
    "while_loop": lambda a: lw.while_loop(lambda b: b.sum() > 0.1, lambda b: b / 2, a),
    "error_if": lambda a: lw.error_if(a, a.sum() > 100, "too large"),
}


@pytest.mark.parametrize("name", DECIDES)
def test_lanes_cannot_part_under_the_compiler(name):
    torch._dynamo.reset()
    compiled = torch.compile(lambda xs: lw.vmap(DECIDES[name])(xs), backend="eager")
    with pytest.raises(TransformError, match=r"torch.compile compiles, lanes cannot take different ways") as found:
        compiled(X)
    assert "compiled = torch.compile(" in str(found.value)
    assert "issue" not in str(found.value)
    torch.testing.assert_close(lw.vmap(DECIDES[name])(X), torch.stack([torch.as_tensor(DECIDES[name](x)) for x in X]))


@pytest.mark.parametrize("in_dims", [(0, 0), (None, 0), (0, None)])
def test_keys_under_the_compiler(in_dims, capfd):
    keys, counts = lw.random.split(lw.random.key(0), 4), torch.arange(4)
    key = keys if in_dims[0] == 0 else keys[1]
    count = counts if in_dims[1] == 0 else counts[1]

    def noisy(key, count):
        return lw.random.normal(lw.random.fold_in(key, count), (3,))

    program = lw.vmap(noisy, in_dims=in_dims)
    torch._dynamo.reset()
    out = torch.compile(lambda *args: program(*args), backend="eager", fullgraph=True)(key, count)
    torch.testing.assert_close(out, program(key, count))
    assert "batching rule" not in capfd.readouterr().err


def test_a_compiled_function_under_vmap():
    torch._dynamo.reset()
    g = torch.compile(lambda a: a.sin() * 2, backend="eager")
    torch.testing.assert_close(lw.vmap(g)(X), X.sin() * 2)
    torch.testing.assert_close(lw.vmap(lw.grad(lambda a: g(a).sum()))(X), 2 * X.cos())
    torch.testing.assert_close(lw.jvp(g, (X,), (X,))[1], 2 * X * X.cos())
    h = torch.compile(lambda a: a[0] * torch.ones(3, dtype=D) + torch.arange(3), backend="eager")
    torch.testing.assert_close(lw.vmap(h)(X), X[:, :1] + torch.arange(3))
    torch.testing.assert_close(h(V), V[0] + torch.arange(3))
    asks = torch.compile(lambda a: a * 2 if a.requires_grad or a.dim() == 1 else a, backend="eager")
    torch.testing.assert_close(lw.vmap(asks)(X), 2 * X)


def _branches(a):
    if a.sum() > 0:
        return a.sin()
    return a * 3


def _halves(a):
    n = 0
    while a.norm() > 0.5 and n < 9:
        a, n = a / 2, n + 1
    return a * n


def _asks(a):
    return a * a.sum().item() + torch.zeros(3, dtype=D)


@pytest.mark.parametrize(("backend", "fullgraph"), [("eager", False), ("eager", True), ("aot_eager", True)])
@pytest.mark.parametrize("function", [_branches, _halves, _asks])
def test_a_compiled_function_whose_lanes_part(function, backend, fullgraph):
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=fullgraph)
    loss = lambda g: lambda a: g(a).sum()
    for transform in (
        lambda g: g,
        lambda g: lw.grad(loss(g)),
        lambda g: lw.jacfwd(g),
        lambda g: lw.hessian(loss(g)),
        lambda g: lambda a: lw.jvp(g, (a,), (a,))[1],
    ):
        torch.testing.assert_close(lw.vmap(transform(compiled))(X), lw.vmap(transform(function))(X))
    torch.testing.assert_close(lw.vmap(lw.vmap(compiled))(X[None]), torch.stack([function(x) for x in X])[None])
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_derivatives_of_a_compiled_function(backend):
    torch._dynamo.reset()
    cubes = torch.compile(lambda a: (a**3).sum(), backend=backend, fullgraph=True)
    torch.testing.assert_close(lw.hessian(cubes)(V), torch.diag(6 * V))
    torch.testing.assert_close(lw.grad(lambda a: (lw.grad(cubes)(a) ** 2).sum())(V), 36 * V**3)
    torch.testing.assert_close(lw.jacrev(torch.compile(torch.sin, backend=backend))(V), torch.diag(V.cos()))
    leaf = V.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(lw.grad(cubes)(leaf).sum(), leaf)[0], 6 * V)


def test_a_compiled_module_whose_lanes_part():
    class Layer(torch.nn.Linear):
        def forward(self, a):
            return super().forward(a).tanh() if a[0] > 0 else super().forward(a)

    torch._dynamo.reset()
    layer, own = Layer(3, 3, dtype=D), Layer(3, 3, dtype=D)
    own.compile(backend="eager", fullgraph=True)
    for module in (torch.compile(layer, backend="eager", fullgraph=True), own):
        plain = Layer(3, 3, dtype=D)
        plain.load_state_dict({name.removeprefix("_orig_mod."): t for name, t in module.state_dict().items()})
        torch.testing.assert_close(lw.vmap(module)(X), torch.stack([plain(x) for x in X]))


# Each is the first to compile in its process. All names in `compiles` are led elsewhere while a transform runs.
FIRST = {
    "a lane": "lw.vmap(lambda a: torch.compile(compiles, backend='eager', fullgraph=True)(a))(x)",
    "what is captured": "lw.vmap(lambda a: a + torch.compile(compiles, backend='eager', fullgraph=True)(x[0]))(x)",
    "a function to differentiate twice": (
        "hessian = lw.hessian(lambda a: torch.compile(lambda a: (a**3).sum(), backend='aot_eager')(a))(x[0])\n"
        "assert torch.equal(hessian, torch.diag(6 * x[0]))"
    ),
    "an option that torch lacks": (
        "torch.compile(lw.vmap(lambda: torch.ones(2), axis_size=3), backend='eager')()\n"
        "assert torch.equal(torch.compile(lw.vmap(lambda a: torch.ones(2)), backend='eager')(x), torch.ones(2, 2))"
    ),
    "in another thread": """
opened, done = threading.Event(), threading.Event()
thread = threading.Thread(target=lambda: lw.vmap(lambda a: (opened.set(), done.wait(), a)[2])(x))
thread.start()
opened.wait()
torch.compile(compiles, backend="eager", fullgraph=True)(x[0])
done.set()
thread.join()
torch._dynamo.reset()
lw.vmap(torch.sin)(x)
""",
}


@pytest.mark.parametrize("first", FIRST)
def test_what_compiles_first_leaves_nothing_behind(first):
    program = f"""
import threading
import torch
import lanewise as lw

x = torch.arange(6.0).view(2, 3)

def compiles(a):
    return torch.empty(3).copy_(a) + torch.einsum("i,i->i", a, a) + torch.tensor(1.0) + torch.empty_like(a).zero_()

{FIRST[first]}
want = compiles(x[0])
assert torch.equal(torch.compile(compiles, backend="eager", fullgraph=True)(x[0]), want)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_options_that_torch_lacks_are_refused():
    with pytest.raises(TransformError, match="vmap: axis_size= does not work under torch.compile"):
        compiling.traced("vmap", torch.sin, axis_size=3)
    with pytest.raises(TransformError, match='jacrev: chunk_size="auto" does not work under torch.compile'):
        compiling.traced("jacrev", torch.sin, chunk_size="auto")
    with pytest.raises(TransformError, match="jacfwd: chunk_size= does not work under torch.compile"):
        compiling.traced("jacfwd", torch.sin, chunk_size=2)


def test_nothing_is_handed_over_otherwise():
    with pytest.raises(AssertionError, match=r"called outside of torch\.compile"):
        compiling.traced("grad", f)
