"""functionalize: the same results and writes as the function itself, and no writes to be seen from below."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import lanewise as lw
from lanewise.errors import TransformError

D = torch.float64


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, lw._core.plane.Plane) for kind in types):
            return NotImplemented
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def overlapping(x):
    a, b = x[:2], x[1:3]
    a.mul_(2)
    b.add_(a.clone())
    a.copy_(b.clone())
    return x.clone(), b


def in_place_views(x):
    y = x.clone()
    z = y.t_()
    z.unsqueeze_(0)[0, 1].fill_(3)
    return y.squeeze_(0), z


def many_views(x):
    y = x.clone()
    y.view(-1)[1:4].sin_()
    y.t()[0].neg_()
    y.permute(1, 0)[1:].add_(1)
    y.unfold(0, 2, 2)[0].zero_()
    y.detach()[0].mul_(2)
    y.diagonal().fill_(7)
    y.as_strided((2,), (1,)).add_(1)
    y.unsqueeze(1).squeeze(1).transpose(0, 1)[0, 0] = 5
    y[[0, 2]] = -1
    y[y > 2] = 2
    return y


def parts(x):
    y = x.clone()
    y.split(1)[1].exp_()
    y.unbind(1)[0].mul_(y.unbind(1)[1])
    y.chunk(2, 1)[1].fill_(2)
    return y


def outs(x):
    y = torch.zeros(0, dtype=x.dtype)
    torch.add(x, x, out=y)
    z = torch.empty_like(x)
    torch.mul(x, y, out=z)
    values, indices = torch.zeros(0, dtype=x.dtype), torch.zeros(0, dtype=torch.long)
    torch.max(z, 0, out=(values, indices))
    return y, z, values, indices


def inputs_written(x):
    x.add_(1)
    x[0].zero_()
    return x.sum()


def kinds_of_writes(x):
    y = torch.zeros(3, dtype=torch.float32)
    y.copy_(x[:, 0])
    y.add_(x[0, 0].long())
    z = torch.view_as_complex(x.clone()[:, :2].contiguous())
    z.imag.fill_(2)
    w = x.clone()
    w.real.mul_(2)
    torch._foreach_mul_([w, y], 2)
    return y, torch.view_as_real(z), w, w.index_add_(0, torch.tensor([0, 0]), x[:2])


FUNCTIONS = [overlapping, in_place_views, many_views, parts, outs, inputs_written, kinds_of_writes]
every = pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)


def same(got, want):
    got, want = ((got,), (want,)) if isinstance(want, torch.Tensor) else (got, want)
    assert len(got) == len(want)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@every
@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
def test_the_results_are_those_of_the_function(f, remove):
    ours, theirs = seeded(3, 4), seeded(3, 4)
    same(lw.functionalize(f, remove=remove)(ours), f(theirs))
    assert ours.equal(theirs), "the write into the argument is another one"


@every
def test_nothing_is_written_below(f):
    x = seeded(3, 4)
    with Seen() as below:
        lw.functionalize(f)(x)
    writes = [op for op in below.ops if op._schema.is_mutable]
    assert writes == ([torch.ops.aten.copy_.default] if f in (overlapping, inputs_written) else [])
    with Seen() as plain:
        f(seeded(3, 4))
    assert any(op._schema.is_mutable for op in plain.ops)


def test_views_are_copied_if_asked():
    x = seeded(3, 4)
    with Seen() as below:
        lw.functionalize(many_views, remove="mutations_and_views")(x)
    names = {op._schema.name for op in below.ops}
    assert "aten::select_copy" in names and "aten::select" not in names


def test_a_graph_has_no_writes():
    def f(x):
        y = x.clone()
        y[0].add_(1)
        return y * 2

    graph = make_fx(lw.functionalize(f))(seeded(3))
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.add_.Tensor not in targets and torch.ops.aten.add.Tensor in targets
    same(graph(seeded(3, seed=1)), f(seeded(3, seed=1)))


@pytest.mark.parametrize("f", [many_views, in_place_views], ids=lambda f: f.__name__)
def test_with_other_transforms(f):
    x = seeded(2, 3, 4)
    total = lambda f: lambda x: sum(t.sum() for t in (lambda out: out if isinstance(out, tuple) else (out,))(f(x)))
    same(lw.grad(total(lw.functionalize(f)))(x[0]), lw.grad(total(f))(x[0]))
    same(lw.functionalize(lw.grad(total(f)))(x[0]), lw.grad(total(f))(x[0]))


def test_vmap_inside_and_outside():
    def f(x):
        y = x.clone()
        y[0].mul_(y[1])
        return y

    x = seeded(2, 3, 4)
    want = torch.stack([f(a) for a in x])
    same(lw.vmap(lw.functionalize(f))(x), want)
    same(lw.functionalize(lw.vmap(f))(x), want)


def test_history_and_captured_tensors():
    x, w = seeded(3).requires_grad_(), torch.zeros(3, dtype=D)

    def f(x):
        y = x * 2
        y[0].mul_(x[1])
        w.add_(x.detach())
        return y.sum()

    lw.functionalize(f)(x).backward()
    v = seeded(3)
    want = torch.stack([4 * v[1] / 2, 2 + 2 * v[0], torch.tensor(2.0, dtype=D)])
    same(x.grad, want)
    same(w, x.detach())


def test_one_tensor_given_twice_is_one_memory():
    x = seeded(3)
    same(lw.functionalize(lambda a, b: a.add_(1) * b)(x, x), (seeded(3) + 1) ** 2)


def test_remove_is_checked():
    with pytest.raises(TransformError, match="received invalid argument for remove='all'"):
        lw.functionalize(torch.sin, remove="all")
