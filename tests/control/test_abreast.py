"""Functions of tensors whose lanes go one way run, from their third call on, on no plane, and as in a loop."""

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanewise import functional_call, grad, grad_and_value, jacrev, vmap
from lanewise._control.abreast.values import state
from lanewise._core.batch import BatchLevel
from tests.control.tensor_programs import EXPRESSIONS, expression_program, tensor_program

FULL = bool(os.environ.get("LANEWISE_FULL"))

D = torch.float64
CALLS = 4


class Planes:
    """Counts the planes of lanes that open."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, run: Callable[[], Any]) -> int:
        before = self.count
        run()
        return self.count - before


@pytest.fixture
def planes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Planes]:
    found = Planes()
    begin = BatchLevel.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        found.count += 1
        begin(self, *args, **kwargs)

    monkeypatch.setattr(BatchLevel, "__init__", counted)
    yield found


def _numbers(*shape: int, seed: int = 0, dtype: torch.dtype = D) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _places(*shape: int, below: int, seed: int = 0) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def _looped(f: Callable, *xs: Tensor) -> Any:
    rows = [f(*row) for row in zip(*xs)]
    return tuple(map(torch.stack, zip(*rows))) if isinstance(rows[0], tuple) else torch.stack(rows)


def _same(out: Any, want: Any, tolerance: float = 1e-7) -> None:
    out, want = [each if isinstance(each, tuple) else (each,) for each in (out, want)]
    assert len(out) == len(want)
    for a, b in zip(out, want):
        assert a.dtype is b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
        torch.testing.assert_close(a, b, equal_nan=True, rtol=tolerance, atol=tolerance)


def _gradients(f: Callable, xs: tuple, *rest: Tensor) -> tuple:
    """The result of f where torch records `xs`, and the gradients in these of a weighted sum of it."""
    leaves = [x.clone().requires_grad_() for x in xs]
    out = f(*leaves, *rest)
    outs = [each for each in (out if isinstance(out, tuple) else (out,)) if each.requires_grad]
    if not outs:
        return out, tuple(torch.zeros_like(leaf) for leaf in leaves)
    seeds = [torch.linspace(0.5, 1, each.numel(), dtype=each.dtype).view(each.shape) for each in outs]
    return out, torch.autograd.grad(outs, leaves, seeds, allow_unused=True, materialize_grads=True)


def _check(f: Callable, xs: tuple, *rest: Tensor, tolerance: float = 1e-7) -> None:
    """`vmap(f)`, with and without a record outside, called often enough to run on plain tensors."""
    want = _looped(f, *xs, *rest)
    for _ in range(CALLS):
        _same(vmap(f)(*xs, *rest), want, tolerance)
    try:
        out, grads = _gradients(functools.partial(_looped, f), xs, *rest)
    except RuntimeError:
        return  # torch has no such derivative
    for _ in range(2):
        found = _gradients(vmap(f), xs, *rest)
        _same(found[0], out, tolerance)
        _same(found[1], grads, tolerance)


# --- programs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(1500 if FULL else 80))
def test_random_programs_equal_the_loop(seed: int) -> None:
    dtype, tolerance = ((D, 1e-7), (torch.float32, 1e-3))[seed % 4 == 3]
    f = tensor_program(seed, dtype, 3 + seed % 8)
    size = (1, 2, 3, 5)[seed % 4]
    xs = tuple(_numbers(size, *shape, seed=seed + len(shape), dtype=dtype) for shape in ((3, 4), (4, 4), (4,)))
    i = _places(size, 2, below=3, seed=seed)
    try:
        want = _looped(f, *xs, i)
    except RuntimeError:
        pytest.skip("some of its lanes cannot be computed")
    _check(f, xs, i, tolerance=tolerance)
    x, y, a = xs
    for _ in range(2):
        some = _looped(lambda x, a: f(x, y[0], a, i[0]), x, a)
        _same(vmap(f, (0, None, 0, None))(x, y[0], a, i[0]), some, tolerance)
    if isinstance(want, tuple) or want.dim() > 1:
        return
    _, grads = _gradients(lambda *xs: 2 * _looped(f, *xs, i).sum(), xs)  # (the weight of the one number is a half)
    pairs = torch.stack([torch.stack([f(x, y, a[0], i[0]) for x in xs[0]]) for y in xs[1]])
    for _ in range(CALLS):
        found = vmap(grad(f, argnums=(0, 1, 2)))(*xs, i)
        _same(tuple(each.detach() for each in found), grads, tolerance)  # (they hang on the parameters of NET)
        both = vmap(vmap(f, (0, None, None, None)), (None, 0, None, None))
        _same(both(x, y, a[0], i[0]), pairs, tolerance)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_each_expression_opens_no_plane(expression: str, planes: Planes) -> None:
    f = expression_program(expression)
    xs, i = (_numbers(3, 3, 4), _numbers(3, 4, 4, seed=1), _numbers(3, 4, seed=2)), _places(3, 2, below=3)
    _check(f, xs, i)
    assert planes.of(lambda: vmap(f)(*xs, i)) == 0


# --- layers ----------------------------------------------------------------------------------------------------------


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().to(D)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 3), (6,)),
    "linear without bias, of rows": (lambda: nn.Linear(6, 3, bias=False), (2, 5, 6)),
    "activations": (
        lambda: nn.Sequential(nn.ReLU(), nn.ELU(0.5), nn.CELU(2.0), nn.LeakyReLU(0.2), nn.Softplus(2.0, 10.0)),
        (4, 6),
    ),
    "further activations": (
        lambda: nn.Sequential(nn.ReLU6(), nn.SiLU(), nn.Mish(), nn.LogSigmoid(), nn.Softsign(), nn.SELU(), nn.Tanh()),
        (6,),
    ),
    "hardtanh, sigmoid, gelu": (
        lambda: nn.Sequential(nn.Hardtanh(-0.5, 0.7), nn.Sigmoid(), nn.GELU("tanh"), nn.GELU()),
        (6,),
    ),
    "layer norm": (lambda: nn.LayerNorm((5, 6)), (2, 5, 6)),
    "rms norm": (lambda: nn.RMSNorm(6), (5, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3)),
    "dropout that is off": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).eval(), (6,)),
    "conv1d": (lambda: nn.Conv1d(4, 2, 3, padding="same"), (2, 4, 7)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1, groups=1), (3, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2), (1, 2, 3, 3, 3)),
    "cnn": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(-3), nn.Linear(16, 3)),
        (2, 1, 6, 6),
    ),
    "attention": (lambda: _Attending(True), (5, 8)),
    "attention of several": (lambda: _Attending(True), (2, 5, 8)),
    "attention, sequence first": (lambda: _Attending(False), (5, 2, 8)),
    "attention without biases": (lambda: _Attending(True, bias=False), (2, 5, 8)),
    "attention with a mask": (lambda: _Masked(), (5, 8)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (2, 5, 8)),
    "encoder layer, norm first": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, F.gelu, norm_first=True, batch_first=True),
        (5, 8),
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True),
            2,
            nn.LayerNorm(8),
            enable_nested_tensor=False,
        ),
        (2, 5, 8),
    ),
}


class _Attending(nn.Module):
    def __init__(self, batch_first: bool, **options: Any) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        out, weights = self.own(x, x, x)
        _, each = self.own(x, 2 * x, x + 1, average_attn_weights=False)
        return out, weights, each, self.own(x, 2 * x, x + 1, need_weights=False)[0]


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("ahead", torch.ones(5, 5, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        added = torch.zeros(5, 5, dtype=x.dtype).masked_fill(self.ahead, -1.5)
        hidden = self.own(x, x, x, attn_mask=self.ahead, need_weights=False)[0]
        return hidden, *self.own(x, x, x, attn_mask=added)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, planes: Planes) -> None:
    make, shape = LAYERS[name]
    net = _made(make)
    x = _numbers(3, *shape)
    with torch.no_grad():
        want = _looped(net, x)
        for _ in range(CALLS):
            _same(vmap(net)(x), want)
        assert planes.of(lambda: vmap(net)(x)) == 0
    _check(net, (x,))
    params = list(net.parameters())
    assert planes.of(lambda: vmap(net)(x)) == 0
    if not params:
        return
    found, wanted = [
        torch.autograd.grad([each.square().sum() for each in (out if isinstance(out, tuple) else (out,))], params)
        for out in (vmap(net)(x), _looped(net, x))
    ]
    _same(found, wanted)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3)])
def test_recurrent_layers(kind: Any, batch_first: bool, shape: tuple, planes: Planes) -> None:
    net = _made(lambda: kind(3, 4, num_layers=2, bidirectional=True, batch_first=batch_first))
    x = _numbers(6, *shape)

    def outputs(x: Tensor) -> tuple[Tensor, ...]:
        out, hidden = net(x)
        return out, *(hidden if isinstance(hidden, tuple) else (hidden,))

    with torch.no_grad():
        want = _looped(outputs, x)
        for _ in range(CALLS):
            _same(vmap(lambda x: net(x)[0])(x), want[0])
            found = vmap(lambda x: net(x)[1])(x)
            _same(found, want[1:] if kind is nn.LSTM else want[1])
        for _ in range(CALLS):
            _same(vmap(outputs)(x), want)
        assert planes.of(lambda: vmap(outputs)(x)) == 0
    _check(outputs, (x,))


def test_attention_has_a_second_derivative() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask).sin()

    def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
        return (torch.softmax(scores, -1) @ v).sin()

    for rank, mask in itertools.product((2, 3, 4), (None, torch.ones(5, 5, dtype=torch.bool).tril(), _numbers(5, 5))):
        xs = tuple(_numbers(2, *(1, 2, 5, 8)[-rank:], seed=seed) for seed in range(3))

        def second(f: Callable, xs: tuple = xs) -> tuple:
            leaves = [x.clone().requires_grad_() for x in xs]
            first = torch.autograd.grad(f(*leaves).sum(), leaves, create_graph=True)
            return torch.autograd.grad(sum(each.square().sum() for each in first), leaves)

        want = second(functools.partial(_looped, written_out))
        for _ in range(CALLS):
            _same(second(vmap(f)), want)


def test_functional_call(planes: Planes) -> None:
    net = _made(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    params = {name: p.detach() + 1 for name, p in net.named_parameters()}
    before = [p.clone() for p in net.parameters()]
    x = _numbers(5, 4)
    f = lambda params, x: functional_call(net, params, (x,))  # noqa: E731
    want = torch.stack([f(params, row) for row in x])
    mapped = vmap(f, (None, 0))
    for _ in range(CALLS):
        _same(mapped(params, x), want)
    assert planes.of(lambda: mapped(params, x)) == 0
    many = {name: torch.stack([p, 2 * p]) for name, p in params.items()}
    rows = torch.stack([f({name: p[k] for name, p in many.items()}, x[0]) for k in range(2)])
    for _ in range(CALLS):
        _same(vmap(f, (0, None))(many, x[0]), rows)
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before))


def test_losses() -> None:
    scores, classes = _numbers(6, 4), _places(6, below=4)
    _check(F.cross_entropy, (scores,), classes)
    _check(lambda s, c: F.cross_entropy(s, c, ignore_index=int(classes[0])), (scores,), classes)
    rows, many = _numbers(3, 6, 4), _places(3, 6, below=4)
    for reduction in ("mean", "sum"):
        _check(lambda s, c, reduction=reduction: F.cross_entropy(s, c, reduction=reduction), (rows,), many)
    other = _numbers(3, 6, 4, seed=1)
    for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
        for reduction in ("mean", "sum", "none"):
            f = functools.partial(loss, reduction=reduction)
            _check(lambda a, b, f=f: f(a, b), (rows, other))
