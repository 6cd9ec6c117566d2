"""Functions of tensors whose lanes go one way run, from their third call on, on no plane, and as in a loop."""

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanewise import functional_call, grad, grad_and_value, jacrev, vmap
from lanewise._control.abreast.values import state
from tests.control.planes import Planes
from tests.control.tensor_programs import EXPRESSIONS, expression_program, tensor_program

FULL = bool(os.environ.get("LANEWISE_FULL"))

D = torch.float64
CALLS = 4


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
    try:
        _, grads = _gradients(lambda *xs: 2 * _looped(f, *xs, i).sum(), xs)  # (the weight of the one number is a half)
    except RuntimeError:
        pytest.skip("plain torch: no gradient of a source of scatter_add that is larger than the index")
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
    # (Where autograd records them, rows are sorted on a plane.)
    assert planes.of(lambda: vmap(f)(*xs, i)) == int(".sort(" in expression or "topk" in expression)


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
    "batch norm that is off": (
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Unflatten(-1, (1, 3)), nn.BatchNorm2d(4)).eval(),
        (2, 4, 3),
    ),
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


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_in_shared_parameters(name: str, planes: Planes) -> None:
    make, shape = LAYERS[name]
    net = _made(make)
    x = _numbers(3, *shape)
    params = {key: p.detach() for key, p in net.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        out = functional_call(net, params, (x,))
        return sum([each.sin().sum() for each in (out if isinstance(out, tuple) else (out,))])  # type: ignore[return-value]

    def of_one(x: Tensor) -> tuple[Tensor, ...]:
        leaves = {key: p.clone().requires_grad_() for key, p in params.items()}
        return torch.autograd.grad(loss(leaves, x), list(leaves.values()))

    if not params:
        return
    want = tuple(map(torch.stack, zip(*map(of_one, x))))
    mapped = vmap(grad(loss), (None, 0))
    for _ in range(CALLS):
        found = mapped(params, x)
        assert found.keys() == params.keys()
        _same(tuple(found.values()), want)
    # Of a norm without the other half, or a mask, the gradient of each lane is left to a plane.
    assert (planes.of(lambda: mapped(params, x)) > 0) == (name == "rms norm")
    both = vmap(grad_and_value(loss, argnums=(0, 1)), (None, 0))
    for _ in range(CALLS):
        (found, for_x), value = both(params, x)
        _same(tuple(found.values()), want)
    _same(value, torch.stack([loss(params, row) for row in x]))
    leaf = x.clone().requires_grad_()
    _same(for_x, torch.autograd.grad(sum(loss(params, row) for row in leaf), leaf)[0])  # type: ignore[arg-type]


def test_gradients_in_shared_tensors_of_ones_own(planes: Planes) -> None:
    def loss(params: tuple[Any, ...], x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        (weight, bias), table, scale = params
        hidden = torch.tanh(x @ weight + bias) * scale
        words = F.embedding(places, table, padding_idx=1).mean(0)
        out = F.layer_norm(hidden + words, (4,), bias, None)
        return (out * hidden[0]).sum(), out.detach()

    params = ((_numbers(3, 4), _numbers(4, seed=1)), _numbers(6, 4, seed=2), torch.tensor(0.7, dtype=D))
    x, places = _numbers(5, 2, 3, seed=3), _places(5, 4, below=6)

    def of_one(x: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        w, b, t, s = leaves = [p.clone().requires_grad_() for p in (*params[0], *params[1:])]
        value, aux = loss(((w, b), t, s), x, places)
        return *torch.autograd.grad(value, leaves), aux

    want = _looped(of_one, x, places)
    mapped = vmap(grad(loss, has_aux=True), (None, 0, 0))
    for _ in range(CALLS):
        (((w, b), t, s), aux) = mapped(params, x, places)
        _same((w, b, t, s, aux), want)
    assert planes.of(lambda: mapped(params, x, places)) == 0

    def penalized(params: tuple[Any, ...], x: Tensor, places: Tensor) -> Tensor:
        return loss(params, x, places)[0] + params[0][0].square().sum()  # what is no layer, of a matrix

    plain = vmap(grad(penalized), (None, 0, 0))
    for _ in range(CALLS):
        (w, b), *_ = plain(params, x, places)
        _same(w, want[0] + 2 * params[0][0])
    assert planes.of(lambda: plain(params, x, places)) > 0


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

    masks = None, torch.ones(5, 5, dtype=torch.bool).tril(), _numbers(5, 5)
    for rank, mask in itertools.product((2, 3, 4), masks):  # noqa: B007 (`f` reads it)
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
    f = lambda params, x: functional_call(net, params, (x,))
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


# --- what is declined ------------------------------------------------------------------------------------------------


class _Counting:
    """An object that counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    @property
    def scale(self) -> float:
        self.asked += 1
        return 2.0

    def __matmul__(self, x: Tensor) -> Tensor:
        self.asked += 1
        return x * 3 if isinstance(x, Tensor) else x

    def __call__(self, x: Tensor) -> Tensor:
        self.asked += 1
        return x - 1


COUNTING = _Counting()
SEEN: list[float] = []
TABLE = _numbers(2, 3)


def _reads_a_property(x: Tensor) -> Tensor:
    return (x * COUNTING.scale).sum(-1)


def _asks_an_object(x: Tensor) -> Tensor:
    return COUNTING(COUNTING @ x.exp())


def _appends(x: Tensor) -> Tensor:
    y = x.sin()
    SEEN.append(1.0)
    return y


def _writes_to_what_it_made(x: Tensor) -> Tensor:
    y = x * 1
    y[0] = 5
    y += 1
    return y.mul_(2)


def _writes_to_its_argument(x: Tensor) -> Tensor:
    x *= 2
    return x + 1


def _asks_a_number(x: Tensor) -> Tensor:
    return x / x.abs().sum().item()


def _takes_its_way(x: Tensor) -> Tensor:
    return x.cos() if x.sum() > 0 else x * 2


def _asks_which_it_is(x: Tensor) -> Tensor:
    y = x.contiguous()
    return x * 2 if y is x else x * 3


def _draws(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5) * 0 + x


def _tries(x: Tensor) -> Tensor:
    try:
        return F.gelu(x @ TABLE)
    except RuntimeError:
        return F.gelu(x @ TABLE.T)


def _enters(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.exp()
    return y * x


def _formats(x: Tensor) -> Tensor:
    return x * len(f"{x.shape}{x.dim()}")


def _shares_its_result(x: Tensor) -> Tensor:
    return TABLE * 2


@pytest.mark.parametrize(
    "f",
    [
        _reads_a_property,
        _asks_an_object,
        _appends,
        _writes_to_what_it_made,
        _writes_to_its_argument,
        _asks_a_number,
        _takes_its_way,
        _asks_which_it_is,
        _draws,
        _tries,
        _enters,
        _formats,
        _shares_its_result,
    ],
)
def test_others_are_as_ever(f: Callable, planes: Planes) -> None:
    mapped = vmap(f, randomness="different")
    x = _numbers(4, 2, 3)
    want = _looped(f, x.clone())
    counts = []
    for _ in range(CALLS):
        given, before = x.clone(), COUNTING.asked + len(SEEN)
        _same(mapped(given), want)
        counts.append(COUNTING.asked + len(SEEN) - before)
        assert torch.equal(given, x) != (f is _writes_to_its_argument)
    assert len(set(counts)) == 1
    assert planes.of(lambda: mapped(x.clone())) > 0


def test_iterators_from_outside_are_used_once() -> None:
    numbers = iter(range(100))

    def f(x: Tensor) -> Tensor:
        y = x.sin() + x.cos()
        for k in numbers:
            y = y + k
            if k % 5 == 4:
                break
        return y

    x = _numbers(3, 2, 2, 2)
    for call in range(CALLS):
        _same(vmap(f)(x), x.sin() + x.cos() + sum(range(5 * call, 5 * call + 5)))


def test_what_others_put_in_place_of_functions_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    net = _made(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4), nn.Dropout(0.1))).eval()
    f = lambda x: net(x) + F.relu(x).sum()
    x = _numbers(3, 3)
    for _ in range(CALLS):
        vmap(f)(x)
    own_relu, own_linear, own_forward = F.relu, F.linear, nn.LayerNorm.forward
    monkeypatch.setattr(F, "relu", lambda x, inplace=False: own_relu(x) + (x.dim() if x.dim() < 2 else 50))
    _same(vmap(f)(x), _looped(f, x))
    monkeypatch.setattr(F, "linear", lambda x, w, b: own_linear(x, w, b) * (2 if x.dim() == 1 else 50))
    _same(vmap(f)(x), _looped(f, x))
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: own_forward(self, x) - (1 if x.dim() == 1 else 50))
    _same(vmap(f)(x), _looped(f, x))
    monkeypatch.setattr(nn.Sequential, "forward", lambda self, x: self[0](x) if x.dim() == 1 else x)
    _same(vmap(f)(x), _looped(f, x))
    monkeypatch.undo()
    _same(vmap(f)(x), _looped(f, x))


def test_hooks_see_single_examples() -> None:
    net = _made(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh()))
    f = lambda x: net(x) * 2
    x = _numbers(3, 3)
    for _ in range(CALLS):
        vmap(f)(x)
    shapes = []
    handle = net.get_submodule("1").register_forward_hook(
        lambda module, args, out: shapes.append(args[0].shape) or out + 1
    )
    _same(vmap(f)(x), _looped(f, x))
    assert set(shapes) == {torch.Size([4])}
    handle.remove()
    _same(vmap(f)(x), _looped(f, x))
    net[0].forward = lambda x: x.new_ones(4) * x.dim()  # type: ignore[method-assign]
    _same(vmap(f)(x), _looped(f, x))


FACTOR = 2.0


def test_surroundings_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _numbers(3, 3)

    def f(x: Tensor, rate: float = 0.5) -> Tensor:
        return (x @ weight) * FACTOR * rate

    x = _numbers(4, 2, 3)
    for _ in range(CALLS):
        _same(vmap(f)(x), _looped(f, x))
    weight = weight + 1
    _same(vmap(f)(x), _looped(f, x))
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    _same(vmap(f)(x), _looped(f, x))
    f.__defaults__ = (3.0,)
    _same(vmap(f)(x), _looped(f, x))
    net = _made(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))).eval()
    rows = _numbers(4, 5, 3)
    for _ in range(CALLS):
        _same(vmap(net)(rows), _looped(net, rows))


class _Pair(NamedTuple):
    left: Tensor
    right: Tensor


def test_ordinary_python_stays_abreast(planes: Planes) -> None:
    def inner(parts: Any, *more: Tensor, **named: Tensor) -> Tensor:
        first, *others = parts
        for k, (a, b) in enumerate(zip(others, more)):
            first = first + k * a - b
        assert first.dim() == 1, f"{first}"
        return first * sum(named.values(), start=0)

    def f(x: Tensor, y: Tensor) -> Any:
        rows, seen = [], {}
        for name, row in {"x": x, "y": y}.items():
            rows.append(row if isinstance(row, Tensor) else None)
            seen[name] = row.shape[-1]
        if (n := len(rows)) > 5 or not x.is_floating_point():
            raise ValueError(f"{n} rows")
        total = inner([x, y, *[each**2 for each in rows]], x, y, y, scale=x.sum(), more=y.mean())
        i = 0
        while i < seen["x"] and 0 <= i < 2:
            total = total + i
            i += 1
        parts = list(total.unbind()) if x.ndim == 1 else []
        return torch.stack(parts[::-1]), max(rows[0].shape), (total @ total.detach(),) if n == 7 else -total

    def g(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        out = f(x, y)
        return out[0], out[2] * out[1]

    xs = _numbers(4, 3), _numbers(4, 3, seed=1)
    want = _looped(g, *xs)
    for _ in range(CALLS):
        _same(vmap(g)(*xs), want)
    assert planes.of(lambda: vmap(g)(*xs)) == 0


def test_gradients_of_lanes_that_hang_on_captured_parameters() -> None:
    net = _made(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    x = _numbers(5, 3)
    params = list(net.parameters())

    def penalty(rows: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(rows.square().sum(), params, allow_unused=True, materialize_grads=True)

    def loss(x: Tensor) -> Tensor:
        return net(x).sum()

    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(net(leaf).sum(), leaf, create_graph=True)
    for _ in range(CALLS):
        found = vmap(grad(loss))(x)
        _same(found, want)
        _same(penalty(found), _penalties(net, x, params))
    assert not state.careful
    with torch.no_grad():
        for _ in range(CALLS):
            grads, values = vmap(grad_and_value(loss))(x)
            _same(grads, want.detach())
            _same(values, net(x).squeeze(1))


def _penalties(net: nn.Module, x: Tensor, params: list) -> tuple[Tensor, ...]:
    leaf = x.clone().requires_grad_()
    (rows,) = torch.autograd.grad(net(leaf).sum(), leaf, create_graph=True)
    return torch.autograd.grad(rows.square().sum(), params, allow_unused=True, materialize_grads=True)


def test_errors_are_those_of_a_plane() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return F.softmax(x @ y, -1)

    good = _numbers(3, 2, 4), _numbers(3, 4, 5, seed=1)
    for _ in range(CALLS):
        vmap(f)(*good)
    for _ in range(CALLS):
        with pytest.raises(RuntimeError, match=r"test_abreast\.py"):
            vmap(f)(good[0], good[0])
        assert not state.careful
    _same(vmap(f)(*good), _looped(f, *good))


def test_modes_and_recording_around() -> None:
    def f(x: Tensor) -> Tensor:
        return F.layer_norm(x @ x.mT, (3,)).sum(0)

    x = _numbers(4, 3, 3)
    want = _looped(f, x)
    for _ in range(CALLS):
        with torch.inference_mode():
            found = vmap(f)(x)
            assert found.is_inference()
        torch.testing.assert_close(found.clone(), want)
        _same(vmap(f)(x), want)
    half = lambda x: F.linear(x, torch.ones(3, 3)) + 1
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(CALLS):
            _same(vmap(half)(x.float()), _looped(half, x.float()), 1e-2)
    for _ in range(CALLS):
        jac = vmap(jacrev(f))(x)
        _same(jac, torch.stack([torch.autograd.functional.jacobian(f, row) for row in x]))


# --- what was found wrong --------------------------------------------------------------------------------------------


class _Held:
    """An object of which each question counts."""

    def __init__(self) -> None:
        self.count = 0

    def _ask(self, *_: Any) -> Any:
        self.count += 1
        return True

    __bool__ = __contains__ = _ask

    def __float__(self) -> float:
        return float(self._ask())


HELD = _Held()
SHARED = torch.ones(64, dtype=D)
BUFFER = torch.zeros(4, dtype=D)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.sum([]),
        lambda x: x.mean(dim=[]) + x.amax([]) + torch.linalg.vector_norm(x, 2, []),
        lambda x: x.roll(1, []),
        lambda x: torch.roll(x, 1, ()),
        lambda x: sum([x, x * 2], start=10.0),
        lambda x: x * 2 if isinstance(x, torch.DoubleTensor) else x * 3,
        lambda x: x * 2 if isinstance(x.float(), torch.FloatTensor | int) else x * 3,
        lambda x: torch.stack([*x.sort().values]) + torch.stack(tuple(x.topk(4, 0)[0])) if x.dim() == 1 else x.exp(),
    ],
)
def test_values_that_were_wrong(f: Callable) -> None:
    for shape in ((2, 4), (4,)):
        x = _numbers(3, *shape)
        try:
            want = _looped(f, x)
        except (RuntimeError, IndexError):
            continue
        for _ in range(CALLS):
            _same(vmap(f)(x), want)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.stack(x),
        lambda x: torch.cat(x),
        lambda x: F.group_norm(x[:, :1], 2),
        lambda x: nn.Sequential(nn.Tanh(), nn.Tanh())(x, scale=3.0),
        lambda x: ATTENTION(x, x, x, attn_mask=torch.zeros(1, 2, dtype=D)),
        lambda x: ATTENTION(x, x, x, attn_mask=torch.zeros(2, 2, dtype=torch.int64)),
    ],
)
def test_errors_that_were_missing(f: Callable) -> None:
    x = _numbers(3, 2, 4)
    with pytest.raises(Exception):  # noqa: B017 (whatever torch raises for one example)
        f(x[0])
    for _ in range(CALLS):
        with pytest.raises(Exception):  # noqa: B017
            vmap(f)(x)


ATTENTION = nn.MultiheadAttention(4, 2, batch_first=True).to(D).eval()


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * 2 if HELD else x,
        lambda x: x * 2 if "a" in HELD and not HELD else x * 3,
        lambda x: x * float(HELD),
        lambda x: x * max([1.0, 2.0], key=HELD._ask),
        lambda x: F.leaky_relu(x * 1, 0.1, True) + 1,
        lambda x: x * torch.add(BUFFER, 1, out=BUFFER),
    ],
)
def test_effects_happen_once(f: Callable) -> None:
    declined = lambda x: torch.flipud(f(x))
    x = _numbers(1, 2, 4)
    for g in (f, declined):
        for _ in range(CALLS):
            counts, results = [], []
            for run in (lambda g=g: _looped(g, x.clone()), lambda g=g: vmap(g)(x.clone())):
                HELD.count = 0
                BUFFER.zero_()
                results.append(run())
                counts.append((HELD.count, BUFFER.sum().item()))
            assert counts[0] == counts[1]
            _same(*results)


def test_parts_that_are_unpacked_further(planes: Planes) -> None:
    def f(x: Tensor) -> Tensor:
        whole = a, (b, *c) = x, (x.sin(), 2.0, 3.0)
        for k, (p, q) in enumerate([(a, b), (b, c[0])]):
            a = a + k * p * q
        return a + sum(p * q[0] for p, q in [(x, whole[1])])

    x = _numbers(3, 2)
    for _ in range(CALLS):
        _same(vmap(f)(x), _looped(f, x))
    assert planes.of(lambda: vmap(f)(x)) == 0


def test_iterators_that_are_arguments() -> None:
    def unpacks(x: Tensor, it: Any) -> Tensor:
        a, b = it
        return x * a + b

    def unpacks_within(x: Tensor, it: Any) -> Tensor:
        y, (a, b) = x, it
        return y * a + b

    def unpacks_in_a_round(x: Tensor, it: Any) -> Tensor:
        return sum([x * c * a + b for c, (a, b) in [(2.0, it)]], x * 0)

    def spreads(x: Tensor, it: Any) -> Tensor:
        return x * len([*it])

    def counts(x: Tensor, it: Any) -> Tensor:
        for k, c in it:
            x = x + k * c
        return x

    def asks(x: Tensor, it: Any) -> Tensor:
        return x * 2 if 3.0 in it else x * 3

    x = _numbers(1, 2, 4)
    for f, make in (
        (unpacks, lambda: iter([2.0, 3.0])),
        (unpacks_within, lambda: iter([2.0, 3.0])),
        (unpacks_in_a_round, lambda: iter([2.0, 3.0])),
        (spreads, lambda: iter([2.0, 3.0])),
        (counts, lambda: enumerate([2.0, 3.0])),
        (asks, lambda: iter([2.0, 3.0])),
    ):
        for _ in range(CALLS):
            _same(
                vmap(lambda x, it, f=f: torch.flipud(f(x, it)), (0, None))(x, make()),
                torch.flipud(f(x[0], make()))[None],
            )
            _same(vmap(f, (0, None))(x, make()), f(x[0], make())[None])


def test_random_numbers_of_what_is_shared() -> None:
    f = lambda x: x.sum() * F.dropout(SHARED, 0.5, True)
    x = torch.ones(3, 2, dtype=D)
    for _ in range(CALLS):
        a, b, _ = vmap(f, randomness="different")(x)
        assert not torch.equal(a, b)
        with pytest.raises(RuntimeError, match="random"):
            vmap(f)(x)


def test_gradients_know_of_trained_tensors_given_by_name() -> None:
    w = _numbers(2, 4).requires_grad_()
    net = _made(lambda: nn.MultiheadAttention(4, 2, batch_first=True)).requires_grad_(False)
    net.out_proj.bias.requires_grad_(True)
    for f in (
        lambda x: (x.index_add(0, torch.tensor([0, 1]), source=w) ** 2).sum(),
        lambda x: (x.scatter_add(0, torch.zeros(2, 4, dtype=torch.int64), src=w) ** 2).sum(),
        lambda x: (net(x, x, x)[0] ** 2).sum(),
    ):
        for _ in range(CALLS):
            assert vmap(grad(f))(_numbers(3, 2, 4)).requires_grad


def test_methods_of_layers_may_be_others(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = _made(lambda: nn.Conv1d(2, 2, 3, padding=1))
    layer = _made(lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)).eval()
    f = lambda x: conv(x)
    g = lambda x: layer(x)
    h = lambda x: ATTENTION(x, x, x, need_weights=False)[0]
    x = _numbers(3, 2, 4)
    for each in (f, g, h):
        for _ in range(CALLS):
            _same(vmap(each)(x), _looped(each, x))
    own, attend = nn.Conv1d._conv_forward, F.scaled_dot_product_attention
    monkeypatch.setattr(nn.Conv1d, "_conv_forward", lambda self, x, w, b: own(self, x, w, b) * 7)
    monkeypatch.setattr(layer, "_ff_block", lambda x: x * 3, raising=False)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: attend(*args, **kwargs) * 10)
    for each in (f, g, h):
        _same(vmap(each)(x), _looped(each, x))


def test_dtypes_of_losses() -> None:
    numbers = torch.tensor([1, 2, 3], dtype=torch.int32)
    f = lambda x: F.l1_loss(x, x * 2, reduction="sum")
    for _ in range(CALLS):
        _same(vmap(f)(numbers), _looped(f, numbers))


def _sets_ahead(x: Tensor) -> Tensor:
    parts = [x, x, x]
    for k, part in enumerate(parts):
        if k < 2:
            parts[k + 1] = part * 2
    return parts[2]


def _grows(x: Tensor) -> Tensor:
    parts = [x]
    for _, part in enumerate(parts, 1):
        if len(parts) < 4:
            parts.append(part * 2)
    return sum(parts[1:], parts[0])


def _is_used_up(x: Tensor) -> Tensor:
    pairs = zip([x, x * 2], [1, 2], strict=True)
    _, _ = pairs
    return x * (2 + len(list(pairs)))


def _in_pairs(x: Tensor) -> Tensor:
    parts = reversed([x, x * 2, x * 3, x * 4])
    for p, q in zip(parts, parts, strict=True):
        x = x + p * q
    return x


def _is_true(x: Tensor) -> Tensor:
    pairs = zip([x], [], strict=False)
    return x * 2 if pairs else x * 3


def _sets_behind(x: Tensor) -> Tensor:
    parts = [x, x * 2, x * 3]
    for part in reversed(parts):
        parts[0] = parts[0] + part
    return parts[0]


def _sets_before(x: Tensor) -> Tensor:
    parts = {"a": x, "b": x * 2}
    numbered = enumerate(parts.values())
    parts["b"] = x * 7
    for k, part in numbered:
        x = x + k * part
    return x


def _within_pairs(x: Tensor) -> Tensor:
    for k, (p, q) in enumerate(zip([x, x * 2], [x * 3, x], strict=True)):
        x = x + k * p * q
    return x


@pytest.mark.parametrize(
    "f", [_sets_ahead, _grows, _is_used_up, _in_pairs, _is_true, _sets_behind, _sets_before, _within_pairs]
)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_iterators_of_python_go_on_as_they_are_asked(f: Callable, shape: tuple, planes: Planes) -> None:
    x = _numbers(4, *shape)
    for _ in range(CALLS):
        _same(vmap(f)(x), _looped(f, x))
    assert planes.of(lambda: vmap(f)(x)) == 0


class _Causal(nn.Module):
    """A layer of an encoder that is told whether its mask is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, src: Tensor, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False):
        return F.scaled_dot_product_attention(src, src, src, is_causal=is_causal)


class _Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def _with_doubled() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    layer.linear1 = _Doubled(4, 8)
    return layer


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    ("make", "use"),
    [
        (
            lambda: nn.TransformerEncoder(_Causal(), 1, enable_nested_tensor=False),
            lambda net, mask: lambda x: net(x, mask=mask),
        ),
        (
            lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
            lambda net, mask: lambda x: net(x, src_mask=mask),
        ),
        (_with_doubled, lambda net, mask: lambda x: net(x)),
    ],
)
def test_encoders_as_torch_runs_them(make: Callable, use: Callable, recorded: bool) -> None:
    """Parts that others put there, and masks in torch's kernels for whole modules, where nothing is recorded."""
    net = _made(make).eval()
    mask = torch.full((3, 3), -torch.inf, dtype=D).triu(1) if type(net) is nn.TransformerEncoder else -_numbers(3, 3)
    f = use(net, mask)
    x = _numbers(4, 2, 3, 4)
    with torch.set_grad_enabled(recorded):
        for _ in range(CALLS):
            _same(vmap(f)(x), _looped(f, x))
