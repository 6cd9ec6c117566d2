"""Random programs of operations on tensors whose lanes all go one way."""

import itertools
import linecache
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_PRELUDE = """
import math
import torch
import torch.nn.functional as F
from torch import nn

GENERATOR = torch.Generator().manual_seed(5)
W = torch.randn(4, 4, generator=GENERATOR, dtype=DTYPE)
V = torch.randn(4, generator=GENERATOR, dtype=DTYPE)
M = torch.randn(3, 4, generator=GENERATOR, dtype=DTYPE)
S = torch.tensor(0.75, dtype=DTYPE)
TAKE = torch.tensor([2, 0, 1])
ODD = torch.tensor([[True, False, True, False]])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm = nn.LayerNorm(4)
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.GELU()])
        self.scale = 0.5

    def forward(self, x):
        y = self.second(F.silu(self.first(x)))
        for part in self.parts:
            y = part(y) * self.scale
        return self.norm(x + y)

torch.manual_seed(0)
NET = Net().to(DTYPE)
ATTEND = nn.MultiheadAttention(4, 2, batch_first=True).to(DTYPE)

def helper(a, b=2.0, *, c=1):
    n = a.shape[-1] if a.dim() else 1
    return (a * b + c) / n

def summed(parts):
    total = 0
    for part in parts:
        total = total + part
    return total
"""

# t, u: tensors of lanes or shared ones; i: places in them; n: small numbers.
_EXPRESSIONS = """
{t} + {u}|{t} - {u}|{t} * {u}|{t} / (1 + {u} ** 2)|{n} * {t}|1 - {t}|{t} ** 2|-{t}|{t} + {n}|{t}.detach() // 1
{t} % 3|torch.sin({t})|{t}.tanh()|{t}.exp()|torch.sigmoid({t})|{t}.abs()|F.relu({t})|F.gelu({t})|F.softplus({t})
{t}.clamp(-1, 1)|{t}.clamp(min=0)|torch.maximum({t}, {u})|torch.where({t} > {u}, {t}, {u})
torch.where({t} > 0, {t}, 0.5)|torch.atan2({t}, {u})|{t}.masked_fill({u} > 0, 0.25)|{t} @ {u}
torch.matmul({t}, {u})|{t}.mT @ {u}|{t} @ {t}.T|{t}.sum()|{t}.sum({d})|{t}.mean({d}, keepdim=True)
{t}.sum(dim=({d},))|{t}.amax({d})|{t}.max({d}).values|{t}.norm()|{t}.logsumexp({d})|torch.softmax({t}, {d})
{t}.log_softmax({d})|{t}.cumsum({d})|{t}.var({d})|{t}.std(dim={d})|torch.linalg.vector_norm({t}, dim={d})
{t}.sort({d})[0]|{t}.topk(2, {d}).values|{t}.argmax({d})|{t}.mean()|{t}.unsqueeze({d})|{t}.squeeze()
{t}.transpose({d}, {d})|{t}.T|{t}.mT|{t}.reshape(-1)|{t}.flatten()|{t}.permute(1, 0)|{t}.reshape(2, -1)
{t}.unflatten({d}, (2, 2))|{t}.view({t}.shape[0], -1)|{t}.expand(2, *{t}.shape)|{t}.repeat(2, 1)
{t}.chunk(2, {d})[0]|{t}.split(1, {d})[0]|{t}.unbind({d})[1]|{t}.select({d}, 1)|{t}.narrow({d}, 1, 2)
{t}.diagonal()|{t}.flip({d})|{t}.roll(1, {d})|{t}.tril()|torch.diag({t})|{t}.movedim({d}, {d})|{t}.expand_as({u})
torch.diag_embed({t})|{t}[0]|{t}[-1]|{t}[:, 1]|{t}[..., 0]|{t}[None]|{t}[1:]|{t}[:, None]|{t}[::2]|{t}[..., :2]
{t}[i]|{t}[i, 0]|{t}[TAKE]|{t}[i, i]|torch.stack([{t}, {u}])|torch.cat([{t}, {u}], {d})
torch.stack([{t}, {u}], {d})|F.pad({t}, (1, 0))|torch.stack([{t}, {t}, {u}], -1)
torch.einsum("ij,jk->ik", {t}, {u})|torch.einsum("i,j", {t}, {u})|torch.einsum("ij,j->i", {t}, {u})
torch.outer({t}, {u})|torch.dot({t}, {u})|torch.zeros_like({t}) + {u}|{t}.new_zeros({t}.shape) + {t}
torch.zeros(4, dtype=t0) + {t}|torch.eye(4, dtype=t0) @ {t}|F.linear({t}, W)|F.linear({t}, W, V)
F.layer_norm({t}, (4,))|NET({t})|NET.first({t})|F.normalize({t}, dim=-1)|ATTEND({t}, {t}, {t})[0]
ATTEND({t}, {u}, {u}, need_weights=False)[0]|F.scaled_dot_product_attention({t}, {u}, {u})|F.mse_loss({t}, {u})
helper({t})|helper({t}, b={n})|helper({t}, c={u})|summed([{t}, {u}])|summed({t})|sum([{t}, {u}])
{t}.gather({d}, {t}.argsort({d}))|F.cross_entropy({t}, {t}.argmax(-1) * 0 + 1)|{t}.to(torch.float32).to(t0)
{t}.detach() * {u}|{t}.clone()|{t}.contiguous() * 2|torch.linalg.solve({t} + 5 * torch.eye(4, dtype=t0), {u})
torch.linalg.det({t} + 3 * torch.eye(4, dtype=t0))|torch.linalg.inv({t} + 5 * torch.eye(4, dtype=t0))
torch.linalg.cholesky({t} @ {t}.mT + torch.eye(4, dtype=t0))|{t}.index_select({d}, i)
{t}.index_select({d}, TAKE[:2])|{t}.index_add(0, i, {u}[:2])|{t}.index_put((i,), {u}[:2] * 2, accumulate=True)
{t}.scatter_add({d}, {t}.argsort({d}), {u})|{t} if {t}.dim() > 1 else {u}|{t}.float().sum().to(t0) * {u}|{t} * ODD
[{t} * k for k in range(3)][2]|{t} * len({t})|torch.full_like({t}, 2.0) * {u}|{t} * {t}.shape[-1]
({t} > 0).all({d})|{t} > {u}|torch.lerp({t}, {u}, 0.25)|torch.clamp({t}, max=0.5)|{t}.add({u}, alpha=2)
torch.addcmul({t}, {u}, {u}, value=0.5)|{t}.repeat_interleave(2, {d})
"""
EXPRESSIONS = [each for line in _EXPRESSIONS.strip().splitlines() for each in line.split("|")]


def _sample(seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """What a program is given, for one example."""
    numbers = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(3, 4, generator=numbers, dtype=dtype),
        "y": torch.randn(4, 4, generator=numbers, dtype=dtype),
        "a": torch.randn(4, generator=numbers, dtype=dtype),
        "i": torch.tensor([2, 0]),
        "t0": dtype,
    }


_SHARED = ["W", "V", "M", "S"]


def _around(path: str, dtype: torch.dtype) -> dict[str, Any]:
    around: dict[str, Any] = {"__name__": "program", "DTYPE": dtype}
    exec(compile(_PRELUDE, path, "exec"), around)
    return around


def _function(path: str, dtype: torch.dtype, lines: list[str]) -> Callable[..., Any]:
    """`f(x, y, a, i)` of these lines, whose source can be found."""
    text = _PRELUDE + "\ndef f(x, y, a, i):\n    t0 = x.dtype\n" + "".join(f"    {line}\n" for line in lines)
    linecache.cache[path] = (len(text), None, text.splitlines(True), path)
    around: dict[str, Any] = {"__name__": "program", "DTYPE": dtype}
    exec(compile(text, path, "exec"), around)
    return around["f"]


def _value(line: str, around: dict[str, Any], names: dict[str, Any], dtype: torch.dtype) -> Tensor | None:
    """What a line gives for one example; None where it raises, or gives no numbers or many."""
    try:
        found = eval(line, {**around, **names})
    except Exception:
        return None
    if not isinstance(found, Tensor) or not 0 < found.numel() <= 200 or found.dim() > 4:
        return None
    if found.dtype is dtype and not (found.isfinite().all() and found.abs().max() < 1e3):
        return None
    return found


def expression_program(expression: str, dtype: torch.dtype = torch.float64) -> Callable[..., Any]:
    """`f(x, y, a, i)` of one expression, with the first operands that it takes."""
    path = f"<expression {expression} {dtype}>"
    around, names = _around(path, dtype), _sample(0, dtype)
    for t, u, d in itertools.product(("x", "a", "y"), ("x", "y", "a", "W", "V"), ("-1", "0")):
        line = expression.format(t=t, u=u, d=d, n="-1.25")
        if _value(line, around, names, dtype) is not None:
            return _function(path, dtype, [f"return {line}"])
    raise ValueError(f"no operands of a program suit {expression}")


def tensor_program(seed: int, dtype: torch.dtype, statements: int = 7) -> Callable[..., Any]:
    """`f(x, y, a, i)` of tensors [3, 4], [4, 4], [4] and places [2]; a float result, a tuple of two, or a number."""
    source = random.Random(seed)
    path = f"<tensor program {seed} {dtype}>"
    around, names = _around(path, dtype), _sample(seed, dtype)
    lines: list[str] = []
    while len(lines) < statements:
        own = [name for name, value in names.items() if isinstance(value, Tensor) and name != "i"]
        recent = own[-3:]
        line = source.choice(EXPRESSIONS).format(
            t=source.choice(recent + own),
            u=source.choice(recent + own + _SHARED),
            d=source.choice(["0", "1", "-1", "-2"]),
            n=source.choice(["2", "0.5", "-1.25", "3"]),
        )
        found = _value(line, around, names, dtype)
        if found is not None:
            name = f"v{len(lines)}"
            names[name] = found
            lines.append(f"{name} = {line}")
    floats = [name for name, value in names.items() if name.startswith("v") and value.dtype is dtype] or ["x", "y"]
    last, other = floats[-1], source.choice(floats)
    lines.append("return " + source.choice([f"{last}, {other}", last, f"{last}.sum() + {other}.mean()"]))
    return _function(path, dtype, lines)
