"""Hooks of the nodes of autograd's graph, `y.grad_fn.register_prehook` and `register_hook`, in transforms."""

import pytest
import torch

from lanewise import errors, grad, jacrev, jvp, linearize, vjp, vmap
from tests.oracles import assert_same

D = torch.float64
XS = torch.tensor([1.0, 2.0, 3.0], dtype=D)
ONE = torch.ones((), dtype=D)
W = torch.tensor(2.0, dtype=D, requires_grad=True)


def tenfold(x):
    y = x * 3
    y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 10,))
    return (y**2).sum()


def by_the_lane(x):
    y = x * 3
    z = y.sin()
    z.grad_fn.register_prehook(lambda gradients: (gradients[0] * x,))
    return z * y


def set_late(x):
    y = x * 3
    z = y * y
    y.grad_fn.register_prehook(lambda gradients: (gradients[0] + 1,))
    return z + y


def in_branches(x):
    y = x * 3
    y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,) if gradients[0] > 30 else None)
    z = y**2 if x > 1.5 else y**3
    z.grad_fn.register_prehook(lambda gradients: (gradients[0] * 5,))
    return z.sum()


def of_what_asks_first(x):
    y = x * 3
    assert y.requires_grad
    z = y**2
    for node in (y.grad_fn, z.grad_fn):
        node.register_prehook(lambda gradients: (gradients[0] * 10,))
    return z.sum()


def removed(x):
    y = x * 3
    y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 10,)).remove()
    return (y**2).sum()


def with_a_captured_one(x):
    y = x * W
    y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 10,))
    return (y**2).sum()


def of_the_tensor(x):
    """A hook of a tensor, with values of the function, which may have a tangent."""
    y = x * 3
    z = y.sin()
    z.register_hook(lambda gradient: gradient * (x * 2) + torch.ones((), dtype=D) * x)
    return z * y


FUNCTIONS = [
    of_the_tensor,
    tenfold,
    by_the_lane,
    set_late,
    in_branches,
    of_what_asks_first,
    removed,
    with_a_captured_one,
]
each_function = pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)


def slope(f):
    def run(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(f(x), x)[0]

    return run


WAYS = {
    "vmap(grad)": lambda f: vmap(grad(f))(XS),
    "grad(vmap)": lambda f: grad(lambda xs: vmap(f)(xs).sum())(XS),
    "grad(vmap) in chunks": lambda f: grad(lambda xs: vmap(f, chunk_size=2)(xs).sum())(XS),
    "backward": lambda f: slope(lambda xs: vmap(f)(xs).sum())(XS),
    "inside": lambda f: vmap(slope(f))(XS),
    "vjp(vmap)": lambda f: vjp(vmap(f), XS)[1](torch.ones(3, dtype=D))[0],
    "vmap(vjp)": lambda f: vmap(lambda x: vjp(f, x)[1](ONE)[0])(XS),
    "jacrev": lambda f: jacrev(vmap(f))(XS).diagonal(),
    "grad(vmap(vmap))": lambda f: grad(lambda xs: vmap(vmap(f))(xs[None]).sum())(XS),
    "vmap(grad(vmap))": lambda f: vmap(grad(lambda xs: vmap(f)(xs).sum()))(XS[None])[0],
    "jvp(vmap(grad))": lambda f: jvp(vmap(grad(f)), (XS,), (XS,))[0],
    "linearize(vmap(grad))": lambda f: linearize(vmap(grad(f)), XS)[0],
    "grad of vmap(jvp)": lambda f: grad(lambda xs: vmap(lambda x: jvp(f, (x,), (ONE,))[0])(xs).sum())(XS),
    "grad of jvp(vmap)": lambda f: grad(lambda xs: jvp(vmap(f), (xs,), (XS,))[0].sum())(XS),
}


@each_function
@pytest.mark.parametrize("way", WAYS)
def test_prehooks(f, way):
    assert_same(WAYS[way](f), torch.stack([slope(f)(x) for x in XS]))


@each_function
def test_second_derivatives(f):
    def twice(x):
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(x), x, create_graph=True)
        return torch.autograd.grad(first, x)[0]

    want = torch.stack([twice(x) for x in XS])
    assert_same(vmap(grad(grad(f)))(XS), want)
    assert_same(grad(lambda xs: grad(lambda xs: vmap(f)(xs).sum())(xs).sum())(XS), want)


def hooked(x):
    y = x * 3
    y.grad_fn.register_hook(lambda inputs, outputs: tuple([None if g is None else g * outputs[0] for g in inputs]))
    return (y**2).sum()


@pytest.mark.parametrize("way", ["vmap(grad)", "inside", "vmap(vjp)", "jvp(vmap(grad))", "linearize(vmap(grad))"])
def test_hooks_in_passes_of_the_plane(way):
    assert_same(WAYS[way](hooked), torch.stack([slope(hooked)(x) for x in XS]))


@pytest.mark.parametrize("way", ["grad(vmap)", "backward", "vjp(vmap)", "grad(vmap(vmap))", "grad of vmap(jvp)"])
def test_hooks_in_passes_below_raise(way):
    with pytest.raises(errors.TransformError) as caught:
        WAYS[way](hooked)
    said = str(caught.value).splitlines()
    start, end = said[0].split(" below ")
    assert start == "MulBackward0.register_hook: the gradient passes"
    assert " level " in end
    assert end.endswith(", where the node stands for several, and no one knows the gradients of its operands")
    assert "y.grad_fn.register_hook(lambda inputs" in said[1]
    assert said[2:] == [
        "Write instead:",
        "  y.register_hook(hook)             # of the gradient of the result, which a hook may change",
        "  y.grad_fn.register_prehook(hook)  # likewise",
        "  x.register_hook(hook)             # of the gradient of an operand",
    ]


def test_hooks_that_no_pass_below_comes_to():
    """A function that differentiates itself, below a plane that differentiates what else it gives."""

    def f(x):
        inner = x.detach().requires_grad_()
        g = slope(hooked)(inner)
        return x * g

    assert_same(grad(lambda xs: vmap(f)(xs).sum())(XS), torch.stack([slope(hooked)(x) for x in XS]))


def test_nodes_of_several_results():
    def f(x):
        a, b = torch.stack([x, x * 2]).unbind()
        a.grad_fn.register_prehook(lambda gradients: gradients)
        return a * b

    assert_same(vmap(lambda x: x * 1)(XS), XS)
    with pytest.raises(errors.TransformError, match="UnbindBackward0.register_prehook: the node has several results"):
        grad(lambda xs: vmap(f)(xs).sum())(XS)


def test_what_else_a_node_is():
    def f(x):
        y = x * 3
        assert y.grad_fn is not None
        assert y.grad_fn.name() == "MulBackward0"
        edge = torch.autograd.graph.get_gradient_edge(y)
        assert isinstance(edge.node, torch.autograd.graph.Node)
        assert y.grad_fn == y.grad_fn
        assert y.grad_fn.next_functions
        return y * 2

    assert_same(grad(lambda xs: vmap(f)(xs).sum())(XS), torch.full((3,), 6.0, dtype=D))
    assert vmap(lambda x: x * (1 if (x * 3).grad_fn is None else 2))(XS).equal(XS)
