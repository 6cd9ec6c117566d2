"""The case table: functions of one example from every family of ops, with inputs.

`order` is the number of times the function may be differentiated at its inputs (0: values only). Inputs are makers,
called with a seeded generator once per lane, so every lane holds other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Maker = Callable[[torch.Generator], torch.Tensor]


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Maker:
    """Standard normal numbers."""
    return lambda g: torch.randn(shape, generator=g, dtype=dtype)


def positive(*shape: int, dtype: torch.dtype = torch.float64) -> Maker:
    """Numbers in (0.5, 2)."""
    return lambda g: torch.rand(shape, generator=g, dtype=dtype) * 1.5 + 0.5


def unit(*shape: int) -> Maker:
    """Numbers in (0.1, 0.9)."""
    return lambda g: torch.rand(shape, generator=g, dtype=torch.float64) * 0.8 + 0.1


def distinct(*shape: int) -> Maker:
    """Numbers around zero that are far from ties and from zero: small steps of them change no order and no sign."""

    def make(g: torch.Generator) -> torch.Tensor:
        count = torch.Size(shape).numel()
        grid = torch.randperm(count, generator=g).to(torch.float64) - count / 2 + 0.5
        return ((grid + torch.rand(count, generator=g, dtype=torch.float64) * 0.4 + 0.05) / 2).reshape(shape)

    return make


def ints(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Maker:
    """Whole numbers from 0 to high - 1."""
    return lambda g: torch.randint(high, shape, generator=g).to(dtype)


def off_kinks(*shape: int) -> Maker:
    """Numbers whose differences from an even count of `distinct` ones are far from losses' kinks at 0, 1/2 and 1."""
    return lambda g: torch.randint(5, shape, generator=g).to(torch.float64) / 2 + 0.05


def bools(*shape: int) -> Maker:
    """Coin flips."""
    return lambda g: torch.rand(shape, generator=g) < 0.5


def permutation(n: int) -> Maker:
    """An order of n things."""
    return lambda g: torch.randperm(n, generator=g)


def definite(n: int) -> Maker:
    """A symmetric matrix with positive, well separated eigenvalues."""

    def make(g: torch.Generator) -> torch.Tensor:
        q = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64))[0]
        return q @ torch.diag(torch.arange(1.0, n + 1, dtype=torch.float64)) @ q.T

    return make


def regular(*shape: int) -> Maker:
    """Square matrices far from singular."""

    def make(g: torch.Generator) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) * 0.3 + torch.eye(shape[-1], dtype=torch.float64)

    return make


def complex_normal(*shape: int) -> Maker:
    """Complex normal numbers."""
    return normal(*shape, dtype=torch.complex128)


@dataclass(frozen=True)
class Case:
    """A function of one example, makers of its inputs, how often it can be differentiated, tolerances."""

    name: str
    f: Callable[..., Any]
    inputs: tuple[Maker, ...]
    order: int = 2
    tol: tuple[float, float] | None = None
    differences: bool = True  # False: torch's gradient is not the derivative on purpose (padding_idx), or not in double
    empty: bool = True  # False: torch's own double backward fails without elements, so lanes there must be

    def draw(self, lanes: int = 5, seed: int = 0) -> list[tuple[torch.Tensor, ...]]:
        """Inputs of each lane."""
        generator = torch.Generator().manual_seed(seed)
        return [tuple(make(generator) for make in self.inputs) for _ in range(lanes)]

    def __str__(self) -> str:
        return self.name


_CONST = (torch.arange(12, dtype=torch.float64) * 0.37).sin()
_MASK = torch.tensor([True, False, True])


def _loop_in_place(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(3, dtype=torch.float64)
    for i in range(3):
        y[i] = x[i] * x[(i + 1) % 3]
    return y


def _view_then_write(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(2, 3, dtype=torch.float64)
    row = y[1]
    y.add_(0.5)
    row.add_(x.sin())
    return y * y.sum()


def _view_of_input_written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    first = y[0]
    y.mul_(2)
    first.sin_()
    return y


def _recurrence(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = torch.zeros(2, dtype=x.dtype)
    for step in x:
        h = torch.tanh(w @ h + step)
    return h


def _lstm(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros(1, 2, dtype=x.dtype)
    gates = lambda h: F.linear(x[:1], w) + F.linear(h, u)
    i, f, g, o = gates(zero).chunk(4, 1)
    c = i.sigmoid() * g.tanh() + f.sigmoid() * zero
    return o.sigmoid() * c.tanh()


POINTWISE = [
    Case("sin", torch.sin, (normal(3, 2),)),
    Case("add_mul", lambda x, y: x * y + x, (normal(3), normal(3))),
    Case("broadcast", lambda x, y: x * y, (normal(3, 1), normal(2))),
    Case("zero_dim", lambda x, y: x * y.sin(), (normal(), normal())),
    Case("zero_dim_by_vector", lambda s, x: s * x / (1 + s * s), (normal(), normal(3))),
    Case("sub_alpha", lambda x, y: torch.sub(x, y, alpha=2.5), (normal(3), normal(2, 3))),
    Case("rsub_rdiv", lambda x: (2 - x) / x + 1 / (x * x), (positive(3),)),
    Case("pow", lambda x, y: x**y + x**3 + 2.0**y, (positive(3), normal(3))),
    Case("sqrt_log", lambda x: x.sqrt() * x.log() + x.log1p() + x.rsqrt(), (positive(3),)),
    Case("exp_family", lambda x: x.exp() + x.expm1() * x.exp2(), (normal(3),)),
    Case("trig", lambda x: x.tan() + x.asin() * x.acos() + x.atan().cosh(), (unit(4),)),
    Case("atan2_hypot", lambda x, y: torch.atan2(x, y) + torch.hypot(x, y), (positive(3), positive(3))),
    Case("tanh_sigmoid", lambda x: x.tanh() * x.sigmoid() + F.logsigmoid(x), (normal(3),)),
    Case("erf_lgamma", lambda x: x.erf() + x.lgamma() + x.digamma() + torch.special.ndtr(x), (positive(3),)),
    Case("bessel", lambda x: torch.special.i0(x) + torch.special.sinc(x) + torch.special.xlogy(x, x), (positive(3),)),
    Case("abs_sign", lambda x: x.abs() * x.sign() + x.relu(), (distinct(5),)),
    Case("clamp", lambda x: x.clamp(-0.5, 0.7) + x.clamp_min(0.1) * x, (normal(6),)),
    Case("clamp_tensor", lambda x, lo: x.clamp(min=lo), (normal(4), normal(4))),
    Case(
        "maximum", lambda x, y: torch.maximum(x, y) * torch.minimum(x, 2 * y) + torch.fmax(x, y), (normal(4), normal(4))
    ),
    Case("where", lambda m, x, y: torch.where(m, x.sin(), y * y), (bools(4), normal(4), normal(4))),
    Case("where_scalar", lambda x: torch.where(x > 0, x * x, 0.5), (normal(5),)),
    Case("masked_fill", lambda x, m: x.masked_fill(m, 0.3) * x, (normal(4), bools(4))),
    Case("masked_fill_tensor", lambda x, m, v: x.masked_fill(m, v), (normal(4), bools(4), normal())),
    Case("lerp", lambda x, y, w: torch.lerp(x, y, w) + torch.lerp(x, y, 0.3), (normal(3), normal(3), normal(3))),
    Case(
        "addcmul", lambda a, b, c: torch.addcmul(a, b, c, value=0.5) + torch.addcdiv(a, b, 2 + c * c), (normal(3),) * 3
    ),
    Case("floor_round", lambda x: x.floor() + x.round() * x + x.frac(), (normal(4),)),
    Case("fmod_remainder", lambda x, y: torch.fmod(x, y) + torch.remainder(x, 0.7), (normal(4), positive(4)), 1),
    Case(
        "activations", lambda x: F.gelu(x) + F.silu(x) + F.softplus(x) + F.elu(x) + F.mish(x) + F.selu(x), (normal(5),)
    ),
    Case(
        "hard_activations",
        lambda x: F.hardtanh(x) + F.hardswish(x) + F.leaky_relu(x, 0.1) + F.relu6(3 * x),
        (distinct(6),),
    ),
    Case("prelu", lambda x, a: F.prelu(x, a), (normal(2, 3), positive(3))),
    Case("glu", lambda x: F.glu(x, 0) * F.tanhshrink(x[:2]), (normal(4, 2),)),
    Case("nan_to_num", lambda x: torch.nan_to_num(torch.where(x > 0, torch.log(-x), x), nan=0.25), (normal(4),), 0),
    Case(
        "ones_zeros_like",
        lambda x: torch.ones_like(x) * x + torch.zeros_like(x) + torch.full_like(x, 2) * x.exp(),
        (normal(3),),
    ),
]

REDUCTIONS = [
    Case("sum_all", lambda x: x.sin().sum(), (normal(3, 2),)),
    Case("sum_dims", lambda x: x.sin().sum((0, -1)) + x.mean((0, 2), keepdim=True).sum(), (normal(2, 3, 2),)),
    Case("sum_no_dims", lambda x: x.sum(()) * x.sum([]), (normal(3),)),
    Case("prod", lambda x: x.prod() + x.prod(0).sum() + x.prod(1, keepdim=True).sum(), (positive(2, 3),)),
    Case("var_std", lambda x: x.var() + x.std(1).sum() + torch.var_mean(x, 0, correction=0)[1].sum(), (normal(3, 4),)),
    Case(
        "norms",
        lambda x: x.norm() + x.norm(3, dim=0).sum() + torch.linalg.vector_norm(x, 1.5, dim=1).sum(),
        (normal(3, 2),),
    ),
    Case("logsumexp", lambda x: x.logsumexp(0) + torch.logsumexp(x, (0, 1)), (normal(3, 2),)),
    Case("max_min_all", lambda x: x.max() * x.min() + x.amax(0).sum() * x.amin((0, 1)), (distinct(3, 2),)),
    Case("max_dim", lambda x: tuple(x.max(-1)) + tuple(x.min(0)), (distinct(3, 2),)),
    Case("argmax", lambda x: (x.argmax(), x.argmin(0), x.argmax(1, keepdim=True)), (normal(3, 2),), 0),
    Case("median_mode", lambda x: x.median(0)[0] + x.nanmedian(0)[0] + x.kthvalue(2, 0)[0], (distinct(3, 2),)),
    Case("quantile", lambda x: torch.quantile(x, 0.3, dim=0), (distinct(5, 2),)),
    Case("any_all", lambda m: (m.any(), m.all(0), m.any(1, keepdim=True), m.sum()), (bools(3, 2),), 0),
    Case("count_nonzero", lambda x: torch.count_nonzero(x, 0) + (x == 0).sum(0), (ints(2, 3, 2),), 0),
    Case(
        "int_sum_mean",
        lambda x: (x.sum(), x.sum(0), x.prod(), x.to(torch.float64).mean()),
        (ints(5, 3, 2, dtype=torch.int32),),
        0,
    ),
    Case(
        "sum_dtype", lambda x: x.sum(0, dtype=torch.float64), (normal(3, 2, dtype=torch.float32),), 1, differences=False
    ),
    Case("cdist", lambda x, y: torch.cdist(x, y), (normal(3, 2), normal(2, 2)), 1),
    Case("trace_diag", lambda x: x.trace() + x.diagonal().prod(), (normal(3, 3),)),
    Case("dist_renorm", lambda x, y: torch.dist(x, y) + x.renorm(2, 0, 0.5).sum(), (normal(3, 2), normal(3, 2)), 1),
    Case("cosine_similarity", lambda x, y: F.cosine_similarity(x, y, dim=0), (normal(3, 2), normal(3, 2))),
]

VIEWS = [
    Case("reshape", lambda x: x.reshape(-1).sin() + x.t().reshape(6), (normal(2, 3),)),
    Case(
        "view_flatten",
        lambda x: x.contiguous().view(3, 4).flatten() * x.unflatten(0, (1, 2)).flatten(),
        (normal(2, 6),),
    ),
    Case(
        "transpose_permute",
        lambda x: x.permute(2, 0, 1).sin() + x.transpose(0, -1).transpose(1, 2),
        (normal(2, 3, 2),),
        2,
    ),
    Case("movedim", lambda x: x.movedim((0, 1), (2, 0)).cos(), (normal(2, 3, 4),)),
    Case(
        "squeeze_unsqueeze",
        lambda x: x.squeeze() * x.squeeze(0).squeeze(-1) + x.unsqueeze(-1).squeeze(),
        (normal(1, 3, 1),),
    ),
    Case("expand", lambda x: x.expand(2, 3, 4).sin() + x.expand_as(torch.zeros(2, 3, 4)), (normal(3, 1),)),
    Case("broadcast_to_tensors", lambda x, y: sum(torch.broadcast_tensors(x.sin(), y)), (normal(3, 1), normal(2))),
    Case("slices", lambda x: x[1:, ::2] * x[:-1, 1:3] + x[..., 0].sum(), (normal(3, 4),)),
    Case("select_narrow", lambda x: x.select(1, -1) * x.narrow(1, 1, 2).sum(1) + x[0, 0], (normal(3, 4),)),
    Case("none_ellipsis", lambda x: x[None, ..., None, 0] * x[-1], (normal(3, 2),)),
    Case("split_chunk", lambda x: x.split(2)[0].sum() * x.chunk(2)[1] + x.split([1, 3])[0], (normal(4, 2),)),
    Case("unbind", lambda x: x.unbind(1)[0] * x.unbind(0)[1][0], (normal(3, 2),)),
    Case("tensor_split_hsplit", lambda x: x.tensor_split(3)[0] * x.hsplit(2)[1][:1].sum(), (normal(4, 2),)),
    Case("diagonal", lambda x: x.diagonal(0, 0, 2).sin() + torch.diagonal(x, 1, 1, 2).sum(), (normal(2, 3, 2),)),
    Case("diag_embed", lambda x: torch.diag_embed(x.sin(), 1) + torch.diag(x[0], -1), (normal(2, 3),)),
    Case("unfold", lambda x: x.unfold(0, 3, 2).sin(), (normal(7),)),
    Case("as_strided", lambda x: x.contiguous().as_strided((2, 2), (1, 2)).sin(), (normal(6),)),
    Case("flip_roll_rot", lambda x: x.flip(0) * x.roll(1, 1) + x.rot90().rot90() + x.flip(()), (normal(3, 2),)),
    Case("repeat_tile", lambda x: x.repeat(2, 1) * x.tile(2, 1).sin(), (normal(2, 3),)),
    Case("repeat_interleave", lambda x: x.repeat_interleave(2, 0).sin(), (normal(2, 3),)),
    Case(
        "cat_stack",
        lambda x, y: torch.cat([x, y.sin(), x]) * torch.stack([x, y, x * y]).reshape(-1),
        (normal(3), normal(3)),
    ),
    Case("cat_with_constant", lambda x: torch.cat([x, torch.ones(2, dtype=torch.float64)]).sin(), (normal(3),)),
    Case(
        "pad", lambda x: F.pad(x, (1, 2), value=0.5).sin() + F.pad(x[None], (2, 1), mode="circular")[0], (normal(2, 3),)
    ),
    Case(
        "pad_reflect_replicate", lambda x: F.pad(x, (1, 1), "reflect") * F.pad(x, (1, 1), "replicate"), (normal(2, 4),)
    ),
    Case(
        "meshgrid", lambda x, y: torch.stack(torch.meshgrid(x, y.sin(), indexing="ij")).prod(0), (normal(3), normal(2))
    ),
    Case("tril_triu", lambda x: x.tril() * x.triu(-1) + x.tril(1).sin(), (normal(3, 3),)),
    Case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2).sin(), (normal(4, 2, 2),)),
    Case("real_views", lambda x: torch.view_as_real(torch.view_as_complex(x.sin().contiguous())), (normal(3, 2),)),
    Case("empty_tensor", lambda x: (x[:0].sum(), x[:0] * 2, torch.cat([x[:0], x])), (normal(3),)),
]

INDEXING = [
    Case("gather", lambda x, i: x.gather(0, i).sin(), (normal(4, 2), ints(4, 3, 2))),
    Case("index_constant", lambda x: x[[2, 0]] * x[torch.tensor([1, 1])], (normal(3, 2),)),
    Case("index_lanes", lambda x, i: x[i].sin(), (normal(4, 2), ints(4, 3))),
    Case("index_zero_dim", lambda x, i: x[i] * x[0], (normal(4, 2), ints(4))),
    Case("index_two", lambda x, i, j: x[i, j] + x[:, i].sum(0), (normal(4, 4), ints(4, 3), ints(4, 3))),
    Case("index_split", lambda x, i: x[i, :, i].sin(), (normal(3, 2, 3), ints(3, 4))),
    Case("index_constant_lanes", lambda i: _CONST[i].sin(), (ints(12, 3),), 0),
    Case("index_constant_mask", lambda x: x[_MASK].sin(), (normal(3, 2),)),
    Case("index_select", lambda x, i: x.index_select(1, i).sin(), (normal(2, 4), ints(4, 3))),
    Case("take", lambda x, i: x.take(i) * torch.take_along_dim(x.flatten(), i, 0), (normal(3, 2), ints(6, 4))),
    Case("scatter", lambda x, i, s: x.scatter(0, i, s).sin(), (normal(4), permutation(4), normal(4))),
    Case("scatter_add", lambda x, i, s: x.scatter_add(0, i, s).sin(), (normal(3, 2), ints(3, 4, 2), normal(4, 2))),
    Case("scatter_value", lambda x, i: x.scatter(0, i, 0.5) * x, (normal(4), ints(4, 2))),
    Case(
        "scatter_reduce",
        lambda x, i, s: x.scatter_reduce(0, i, s, "amax") + x.scatter_reduce(0, i, s, "mean"),
        (normal(3), ints(3, 5), normal(5)),
        1,
    ),
    Case("index_add", lambda x, i, s: x.index_add(0, i, s, alpha=2).sin(), (normal(3, 2), ints(3, 4), normal(4, 2))),
    Case("index_copy", lambda x, i, s: x.index_copy(0, i, s).sin(), (normal(3, 2), permutation(3), normal(3, 2))),
    Case("index_fill", lambda x, i: x.index_fill(0, i, 0.5) * x, (normal(4, 2), ints(4, 2))),
    Case("index_put", lambda x, i, s: x.index_put((i,), s, accumulate=True).sin(), (normal(4), ints(4, 3), normal(3))),
    Case(
        "slice_scatter",
        lambda x, s: torch.slice_scatter(x, s, 0, 1, 3).sin() + torch.select_scatter(x, s[0], 0, 0),
        (normal(4, 2), normal(2, 2)),
    ),
    Case("masked_scatter", lambda x, m, s: x.masked_scatter(m, s).sin(), (normal(4), bools(4), normal(4)), 1),
    Case(
        "one_hot_embedding",
        lambda i, w: F.embedding(i, w).sin() + F.one_hot(i, 4).sum(),
        (ints(4, 3), normal(4, 2)),
        empty=False,
    ),
    Case(
        "embedding_padding",
        lambda w, i: F.embedding(i, w, padding_idx=1).sin(),
        (normal(4, 2), ints(4, 5)),
        2,
        differences=False,
        empty=False,
    ),
    Case("embedding_bag", lambda w, i: F.embedding_bag(i, w, mode="mean"), (normal(4, 2), ints(4, 2, 3)), 1),
    Case("sort", lambda x: tuple(x.sort(0)) + tuple(x.sort(dim=1, descending=True, stable=True)), (distinct(3, 4),)),
    Case("topk", lambda x: tuple(x.topk(2)) + tuple(x.topk(1, 0, largest=False)), (distinct(3, 4),)),
    Case("argsort_msort", lambda x: (x.argsort(), x.msort().sin()), (distinct(4, 2),)),
    Case(
        "searchsorted",
        lambda s, x: torch.searchsorted(s.sort()[0], x) + torch.bucketize(x, _CONST.sort()[0]),
        (distinct(5), normal(3)),
        0,
    ),
    Case("bincount_histc", lambda x: torch.histc(x, 4, -2, 2), (normal(8),), 0),
    Case("unravel", lambda x: x.reshape(-1)[x.argmax()] * x.sum(), (distinct(3, 2),)),
]

# From torch 2.14 on, that of three dims too goes to a kernel whose gradient plain autograd cannot differentiate.
ATTENTION_ORDER = 2 if torch.__version__ < (2, 14) else 1
MATMUL = [
    Case("dot", torch.dot, (normal(4), normal(4))),
    Case("mv", lambda m, x: m @ x, (normal(3, 4), normal(4))),
    Case("vm", lambda x, m: x @ m, (normal(3), normal(3, 4))),
    Case("mm", lambda a, b: a @ b, (normal(3, 4), normal(4, 2))),
    Case("bmm", torch.bmm, (normal(2, 3, 4), normal(2, 4, 2))),
    Case("matmul_broadcast", torch.matmul, (normal(2, 1, 3, 4), normal(3, 4, 2))),
    Case("matmul_vector_batch", lambda a, x: torch.matmul(a, x), (normal(2, 3, 4), normal(4))),
    Case("linear", F.linear, (normal(3, 4), normal(2, 4), normal(2))),
    Case("linear_vector", lambda x, w: F.linear(x, w).tanh(), (normal(4), normal(2, 4))),
    Case("addmm", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), (normal(2), normal(3, 4), normal(4, 2))),
    Case(
        "baddbmm",
        lambda c, a, b: torch.baddbmm(c, a, b) + torch.addbmm(c[0], a, b),
        (normal(2, 3, 2), normal(2, 3, 4), normal(2, 4, 2)),
    ),
    Case("outer_ger", lambda x, y: torch.outer(x, y) + torch.addr(x[:, None] * y, x, y), (normal(3), normal(2))),
    Case("einsum", lambda a, b: torch.einsum("ij,kj->ik", a, b), (normal(3, 4), normal(2, 4))),
    Case("einsum_three", lambda a, b, c: torch.einsum("ij,jk,k->i", a, b, c), (normal(3, 2), normal(2, 4), normal(4))),
    Case("einsum_trace", lambda a: torch.einsum("ii->", a) * torch.einsum("ij->ji", a), (normal(3, 3),)),
    Case("tensordot", lambda a, b: torch.tensordot(a.t(), b, dims=2), (normal(3, 2), normal(2, 3, 4))),
    Case("kron_cross", lambda a, b: torch.kron(a, b[:2]).sum() + torch.linalg.cross(a, b), (normal(3), normal(3))),
    Case("bilinear", F.bilinear, (normal(2, 3), normal(2, 4), normal(2, 3, 4))),
    Case("chain_matmul", lambda a, b: torch.linalg.multi_dot([a, b, a]), (normal(3, 2), normal(2, 3))),
    Case(
        "attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        (normal(2, 3, 4), normal(2, 5, 4), normal(2, 5, 4)),
        ATTENTION_ORDER,
    ),
    Case(
        "attention_mask",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        (normal(1, 2, 3), normal(1, 4, 3), normal(1, 4, 3), normal(2, 4)),
        2,
    ),
    Case(
        "attention_causal",
        lambda q: F.scaled_dot_product_attention(q, q.sin(), q.cos(), is_causal=True),
        (normal(1, 4, 3),),
        ATTENTION_ORDER,
    ),
    Case("rnn_loop", _recurrence, (normal(3, 2), normal(2, 2))),
    Case("lstm_by_hand", _lstm, (normal(2, 3), normal(8, 3), normal(8, 2))),
]

LINALG = [
    Case("det", lambda a: torch.linalg.det(a) + torch.linalg.slogdet(a)[1], (regular(3, 3),)),
    Case("inv", torch.linalg.inv, (regular(3, 3),)),
    Case("solve", torch.linalg.solve, (regular(3, 3), normal(3, 2))),
    Case("solve_vector", torch.linalg.solve, (regular(3, 3), normal(3))),
    Case(
        "solve_triangular", lambda a, b: torch.linalg.solve_triangular(a, b, upper=False), (regular(3, 3), normal(3, 2))
    ),
    Case("cholesky", lambda a: torch.linalg.cholesky(a @ a.T + torch.eye(3, dtype=a.dtype)), (normal(3, 3),)),
    Case("qr", lambda a: torch.linalg.qr(a), (regular(3, 3),)),
    Case("eigvalsh", lambda a: torch.linalg.eigvalsh(a + a.T), (definite(3),)),
    Case("svdvals", torch.linalg.svdvals, (normal(3, 2),)),
    Case("pinv", torch.linalg.pinv, (normal(3, 2),)),
    Case("matrix_exp_power", lambda a: torch.linalg.matrix_exp(a) + torch.matrix_power(a, 3), (regular(2, 2),)),
    Case("matrix_norm", lambda a: torch.linalg.matrix_norm(a) + torch.linalg.matrix_norm(a, 1), (normal(3, 2),)),
    Case("lstsq_lu", lambda a, b: torch.linalg.lstsq(a, b)[0], (normal(4, 2), normal(4, 1)), 1),
    Case("cholesky_solve", lambda a, b: torch.cholesky_solve(b, a.tril()), (regular(3, 3), normal(3, 2))),
    Case("vander_cov", lambda x: torch.cov(x) + torch.linalg.vander(x[0], N=2).sum(), (normal(2, 4),)),
]

NETWORK = [
    Case("conv1d", lambda x, w, b: F.conv1d(x, w, b, padding=1), (normal(2, 5), normal(3, 2, 3), normal(3))),
    Case("conv2d_batch", lambda x, w: F.conv2d(x, w, stride=2), (normal(2, 2, 5, 5), normal(2, 2, 3, 3))),
    Case("conv2d_groups", lambda x, w: F.conv2d(x, w, groups=2, dilation=2), (normal(1, 2, 5, 5), normal(2, 1, 2, 2))),
    Case("conv2d_unbatched", lambda x, w, b: F.conv2d(x, w, b), (normal(2, 4, 4), normal(2, 2, 3, 3), normal(2))),
    Case("conv3d", lambda x, w: F.conv3d(x, w), (normal(1, 3, 3, 3), normal(2, 1, 2, 2, 2))),
    Case("conv_transpose", lambda x, w: F.conv_transpose1d(x, w, stride=2), (normal(1, 2, 3), normal(2, 2, 2))),
    Case("max_pool", lambda x: F.max_pool2d(x, 2), (distinct(1, 2, 4, 4),)),
    Case("max_pool_unbatched", lambda x: F.max_pool1d(x, 2, 1), (distinct(2, 5),)),
    Case("avg_pool", lambda x: F.avg_pool2d(x, 2, padding=1).sin(), (normal(1, 1, 4, 4),)),
    Case(
        "adaptive_pool",
        lambda x: F.adaptive_avg_pool2d(x, 2).sin() + F.adaptive_max_pool2d(x, 2),
        (distinct(1, 1, 5, 4),),
    ),
    Case("layer_norm", lambda x, w, b: F.layer_norm(x, (3,), w, b), (normal(2, 3), normal(3), normal(3))),
    Case("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), (normal(2, 4, 3), normal(4), normal(4))),
    Case("instance_norm", lambda x: F.instance_norm(x), (normal(2, 2, 4),)),
    # torch's own backward is wrong for a weight with strides, such as a lane of a tensor mapped at its end.
    Case(
        "batch_norm_train",
        lambda x, w, b: F.batch_norm(x, None, None, w.contiguous(), b, training=True),
        (normal(4, 2), normal(2), normal(2)),
    ),
    Case(
        "batch_norm_eval",
        lambda x, m, v: F.batch_norm(x, m.double(), v + torch.ones(2, dtype=x.dtype)),
        (normal(4, 2), ints(3, 2), ints(3, 2)),
    ),
    Case("rms_norm", lambda x, w: F.rms_norm(x, (3,), w) + F.normalize(x, dim=1), (normal(2, 3), normal(3))),
    Case("softmax", lambda x: F.softmax(x, 0) * F.log_softmax(x, -1) + F.softmin(x, 1), (normal(3, 2),)),
    Case(
        "mse_l1_huber",
        lambda x, y: F.mse_loss(x, y) + F.l1_loss(x, y) + F.huber_loss(x, y) + F.smooth_l1_loss(x, y, beta=0.5),
        (distinct(4), off_kinks(4)),
    ),
    Case("cross_entropy", lambda x, i: F.cross_entropy(x, i), (normal(3, 4), ints(4, 3))),
    Case("cross_entropy_one", lambda x, i: F.cross_entropy(x, i, label_smoothing=0.1), (normal(4), ints(4))),
    Case("cross_entropy_prob", lambda x, y: F.cross_entropy(x, F.softmax(y, 1)), (normal(3, 4), normal(3, 4))),
    Case(
        "nll_loss",
        lambda x, i, w: F.nll_loss(F.log_softmax(x, 1), i, weight=w.double() + 1),
        (normal(3, 4), ints(4, 3), ints(3, 4)),
    ),
    Case(
        "bce",
        lambda x, y: F.binary_cross_entropy(x.sigmoid(), y) + F.binary_cross_entropy_with_logits(x, y),
        (normal(4), unit(4)),
    ),
    Case(
        "kl_div", lambda x, y: F.kl_div(F.log_softmax(x, 0), F.softmax(y, 0), reduction="sum"), (normal(4), normal(4))
    ),
    Case(
        "margin_losses",
        lambda x, y: F.margin_ranking_loss(x, x.sin(), y * 2 - 1, margin=0.3) + F.soft_margin_loss(x, y * 2.0 - 1),
        (normal(4), ints(2, 4)),
    ),
    Case(
        "interpolate",
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear").sin() + F.interpolate(x, (4, 4)),
        (normal(1, 1, 2, 2),),
    ),
    Case(
        "grid_sample",
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=True),
        (normal(1, 1, 3, 3), normal(1, 2, 2, 2)),
        1 if torch.__version__ >= (2, 12) else 0,  # torch 2.11 has no derivative of its backward, so no forward mode
    ),
    Case("unfold_fold", lambda x: F.fold(F.unfold(x, 2).sin(), (3, 3), 2), (normal(1, 1, 3, 3),)),
    Case("dropout_off", lambda x: F.dropout(x.sin(), 0.5, training=False), (normal(3),)),
    Case("local_response", lambda x: F.local_response_norm(x, 2), (normal(1, 3, 4),)),
]

CUMULATIVE = [
    Case("cumsum", lambda x: x.cumsum(0).sin() + x.cumsum(-1), (normal(3, 2),)),
    Case("cumprod", lambda x: x.cumprod(0) * x.cumprod(1), (positive(3, 2),)),
    Case("cummax", lambda x: tuple(x.cummax(0)) + tuple(x.cummin(1)), (distinct(3, 2),)),
    Case("logcumsumexp", lambda x: x.logcumsumexp(0), (normal(3, 2),)),
    Case("diff_gradient", lambda x: torch.diff(x, n=2).sin().sum() + torch.gradient(x * x)[0], (normal(5),)),
    Case("trapezoid", lambda x: torch.trapezoid(x.sin(), dx=0.5) + torch.cumulative_trapezoid(x)[0], (normal(4),)),
]

COMPLEX = [
    Case("complex_mul", lambda x, y: x * y + x.conj() * y.exp(), (complex_normal(3), complex_normal(3))),
    Case("complex_parts", lambda x: x.real * x.imag + x.abs(), (complex_normal(3),)),
    Case("complex_build", lambda x, y: torch.complex(x, y.sin()) * torch.polar(x.exp(), y), (normal(3), normal(3))),
    Case("fft", lambda x: torch.fft.fft(x) * torch.fft.ifft(x), (complex_normal(4),)),
    Case("rfft", lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=5).sin(), (normal(5),)),
    Case("fft2", lambda x: torch.fft.fftshift(torch.fft.fft2(x)).abs(), (normal(2, 3),)),
    Case("complex_matmul", lambda a, x: a.mH @ x, (complex_normal(3, 2), complex_normal(3))),
    Case("conj_view", lambda x: (x.conj() + x.conj().imag).resolve_conj().angle(), (complex_normal(3),)),
]

DTYPES = [
    Case(
        "float32",
        lambda x, y: (x @ y).tanh(),
        (normal(3, 2, dtype=torch.float32), normal(2, dtype=torch.float32)),
        1,
        differences=False,
    ),
    Case("half", lambda x: x * x + 1, (normal(3, dtype=torch.float16),), 0),
    Case("bfloat16", lambda x: x.relu() + x.sum(), (normal(3, dtype=torch.bfloat16),), 0),
    Case("promote_zero_dim", lambda s, x: s * x + s, (normal(), normal(3, dtype=torch.float32)), 0),
    Case("promote_zero_dim_int", lambda s, x: s + x, (ints(5), normal(3, dtype=torch.float32)), 0),
    Case("promote_where", lambda s, x: torch.where(x > 0, x, s), (normal(), normal(3, dtype=torch.float32)), 0),
    Case("promote_cat", lambda a, b: torch.cat([a, b]), (normal(2), normal(2, dtype=torch.float32)), 0),
    Case("promote_stack_scalars", lambda a, b: a * 2 + b * 3.5, (ints(5), ints(5, 2, dtype=torch.int32)), 0),
    Case("promote_python_scalar", lambda x: (x + 1, x * 2.5, x / 2, x // 2, 2**x), (ints(5, 3, dtype=torch.int32),), 0),
    Case("promote_clamp", lambda x, s: x.clamp(max=s), (normal(3, dtype=torch.float32), normal()), 0),
    Case("promote_compare", lambda x, s: (x > s, x == s, torch.maximum(x, s)), (ints(5, 3), normal()), 0),
    Case(
        "promote_pow", lambda x, s: (x**s, s**x, torch.atan2(s, x)), (positive(3, dtype=torch.float32), positive()), 0
    ),
    Case("promote_bool", lambda m, s: m * s + m, (bools(3), ints(4)), 0),
    Case("bitwise", lambda a, b: (a & b, a | ~b, a ^ b, a << 1, b >> 1), (ints(8, 3), ints(8, 3)), 0),
    Case(
        "integer_arithmetic",
        lambda a, b: (a % 3, a // (b + 1), -a, a.abs(), torch.gcd(a, b)),
        (ints(9, 3), ints(9, 3)),
        0,
    ),
    Case("logical", lambda a, b: (a & b, a.logical_xor(b), ~a, a.logical_not()), (bools(3), bools(3)), 0),
    Case("casts", lambda x: (x.float(), x.int(), x > 0, x.to(torch.complex64), x.type_as(x.int())), (normal(3),), 0),
    Case("cast_keeps_gradient", lambda x: x.to(torch.float32).sin().double() * x, (normal(3),), 0),
    Case("isfinite", lambda x: (x.isfinite(), x.isnan(), torch.isclose(x, x + 1e-12), x.signbit()), (normal(3),), 0),
]

IN_PLACE = [
    Case("in_place_chain", lambda x: x.clone().mul_(2).add_(x).sin_(), (normal(3),)),
    Case("in_place_view", _view_of_input_written, (normal(3, 2),)),
    Case("fill_factory", _loop_in_place, (normal(3),)),
    Case("view_before_promotion", _view_then_write, (normal(3),)),
    Case("copy_into_factory", lambda x: torch.empty(3, dtype=torch.float64).copy_(x) * x, (normal(3),)),
    Case(
        "slice_assign",
        lambda x: torch.zeros(4, dtype=torch.float64).index_fill_(0, torch.tensor([0]), 1) * x.sum(),
        (normal(3),),
    ),
    Case("mask_assign_where", lambda x: x.clone().masked_fill_(x > 0, 2.0) * x, (normal(4),)),
    Case("index_assign", lambda x, i: x.clone().index_put_((i,), x[:2] * 3), (normal(4), permutation(2))),
    Case("new_zeros_fill", lambda x: x.new_zeros(2, 3).index_add_(0, torch.tensor([1]), x[None].sin()), (normal(3),)),
    Case(
        "factories",
        lambda x: x + torch.arange(3.0) * torch.linspace(0, 1, 3) + torch.eye(3)[1] + torch.full((3,), 2.0),
        (normal(3),),
    ),
    Case("constant_output", lambda x: (x.sin(), torch.ones(2)), (normal(3),), 0),
    Case("captured_constant", lambda x: x * _CONST[:3] + _CONST[3], (normal(3),)),
    Case("transpose_in_place", lambda x: x.clone().t_().sin().unsqueeze_(0), (normal(2, 3),)),
    Case(
        "add_to_row",
        lambda x, r: x.clone().index_copy_(0, torch.tensor([1]), r[None]).cumsum_(0),
        (normal(3, 2), normal(2)),
    ),
    Case("out_argument", lambda x: torch.mul(x, x, out=torch.empty(3, dtype=torch.float64)), (normal(3),), 0),
]

CASES = [
    *POINTWISE,
    *REDUCTIONS,
    *VIEWS,
    *INDEXING,
    *MATMUL,
    *LINALG,
    *NETWORK,
    *CUMULATIVE,
    *COMPLEX,
    *DTYPES,
    *IN_PLACE,
]
FIRST_ORDER = [case for case in CASES if case.order >= 1]
SECOND_ORDER = [case for case in CASES if case.order >= 2]
FIRST_DIFFERENCE = [case for case in FIRST_ORDER if case.differences]
SECOND_DIFFERENCE = [case for case in SECOND_ORDER if case.differences]
