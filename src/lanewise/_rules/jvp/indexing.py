"""Forward rules of indexing, gathering and scattering, joining and rearranging. Indices carry no tangent."""

import math

import torch

from lanewise._core.plane import replace_tensors
from lanewise._rules.jvp.families import elementwise, jointly_linear, jvp_rule, linear, rule_on_plane
from lanewise._rules.jvp.reductions import products_of_segments

aten = torch.ops.aten

linear(
    aten._unsafe_index.Tensor,
    aten._unsafe_masked_index.default,
    aten.diag_embed.default,
    aten.embedding.default,
    aten.flip.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.masked_select.default,
    aten.repeat.default,
    aten.roll.default,
    aten.rot90.default,
    aten.take.default,
    aten.tril.default,
    aten.triu.default,
)

jointly_linear(
    aten._unsafe_index_put.default,
    aten.as_strided_scatter.default,
    aten.block_diag.default,
    aten.cat.default,
    aten.diagonal_scatter.default,
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_put.default,
    aten.masked_scatter.default,
    aten.put.default,
    aten.scatter.src,
    aten.scatter_add.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.stack.default,
)

# Where a number is written, the tangent is 0.
elementwise(aten.index_fill.int_Scalar, lambda t, y, x, dim, index, value: t.index_fill(dim, index, 0))
elementwise(aten.scatter.value, lambda t, y, x, dim, index, value: t.scatter(dim, index, 0))


@jvp_rule(aten.constant_pad_nd.default, guarded=False)
def constant_pad(level, x, pad, value=0):
    """t, padded with 0"""
    return aten.constant_pad_nd.default(x.value, pad, value), aten.constant_pad_nd.default(x.tangent, pad, 0)


@jvp_rule(aten.index_fill.int_Tensor)
def index_fill(level, x, dim, index, value):
    """t_x, with t_value at the indices"""
    index = level.primal(index)
    t, tv = level.tangent(x), level.tangent(value)
    if t is None:
        t = torch.zeros_like(level.primal(x))
    out = level.primal(x).index_fill(dim, index, level.primal(value))
    return out, t.index_fill(dim, index, 0 if tv is None else tv.to(t.dtype))


# --- reductions: torch's formulas are wrong with include_self=False, and divide by the factors of a product -----------


def _reduction(op, products):
    @rule_on_plane(op)
    def rule(level, x, dim, index, source, reduce, *, include_self=True):
        """That of the tangents for sums and means; their mean over those that are the largest, or smallest"""
        if reduce == "prod" and not (level.tangent(x) is None and level.tangent(source) is None):
            return products(x, dim, index, source, include_self)
        return level.pair(*level.below(_reduced, level, op, x, dim, index, source, reduce, include_self))


def _reduced(level, op, x, dim, index, source, reduce, include_self):
    t, ts = level.tangent(x), level.tangent(source)
    (x, index, source), _ = replace_tensors(level.primal, (x, index, source), {})
    y = op(x, dim, index, source, reduce, include_self=include_self)
    if t is None and ts is None:
        return y, None
    t, ts = torch.zeros_like(x) if t is None else t, torch.zeros_like(source) if ts is None else ts
    if reduce in ("sum", "mean"):
        return y, op(t, dim, index, ts, reduce, include_self=include_self)
    if op is aten.index_reduce.default:
        index, source, ts = each_place(x, dim, index, source, ts)
    mine, theirs = x == y, cut(source, index) == y.gather(dim, index)
    if not include_self:
        mine = mine.scatter(dim, index, False)
    total = t.masked_fill(~mine, 0).scatter_add(dim, index, cut(ts, index).masked_fill(~theirs, 0))
    return y, total / mine.to(y.dtype).scatter_add(dim, index, theirs.to(y.dtype))


def each_place(x, dim, index, *sources):
    """x [*S, N, *T], index [I], sources [*S, I, *T] -> the index in the shape of the sources, and these"""
    sources = [source.reshape(index.shape) if not x.dim() else source for source in sources]
    shape = [-1 if d == dim % max(x.dim(), 1) else 1 for d in range(x.dim())]
    return index.reshape(shape or index.shape).expand(sources[0].shape), *sources


def cut(source, index):
    """The first entries of the source, as many in each dim as the index has"""
    return source if source.shape == index.shape else source[tuple(slice(n) for n in index.shape)]


# What counts for nothing in a reduction.
LEAST = {"amax": -math.inf, "amin": math.inf}


def scattered_products(x, dim, index, source, include_self=True):
    """x [*S], index [*I], source [*J] -> [*S]: the products of what goes to each place, without a division"""
    if not x.dim():
        return scattered_products(x[None], 0, index.reshape(-1), source.reshape(-1), include_self)[0]
    source = cut(source, index).movedim(dim, -1)
    at = index.movedim(dim, -1).argsort(stable=True, dim=-1)
    part = x[tuple(slice(n) if d != dim % x.dim() else slice(None) for d, n in enumerate(index.shape))]
    lengths = torch.zeros_like(part, dtype=torch.int64).scatter_add(dim, index, torch.ones_like(index))
    products = products_of_segments(source.gather(-1, at), -1, None, lengths=lengths.movedim(dim, -1)).movedim(-1, dim)
    return _in_front(torch.where(lengths == 0, part, products * part if include_self else products), x)


def _in_front(part, x):
    """x with its first entries replaced, as many in each dim as the part has"""
    for d, n in enumerate(part.shape):
        if n < x.shape[d]:
            return x.slice_scatter(_in_front(part, x.narrow(d, 0, n)), d, 0, n)
    return part


def indexed_products(x, dim, index, source, include_self=True):
    """x [*S, N, *T], index [I], source [*S, I, *T] -> [*S, N, *T]"""
    index, source = each_place(x, dim, index, source)
    return scattered_products(x, dim, index, source, include_self)


_reduction(aten.index_reduce.default, indexed_products)
_reduction(aten.scatter_reduce.two, scattered_products)


@rule_on_plane(aten._pack_padded_sequence.default)
def pack_padded_sequence(level, x, lengths, batch_first):
    """t, packed; how many rows each time has is left plain, as the kernels that read it want it"""

    def below():
        known = level.primal(lengths)
        out, sizes = aten._pack_padded_sequence(level.primal(x), known, batch_first)
        t = level.tangent(x)
        return out, sizes, None if t is None else aten._pack_padded_sequence(t, known, batch_first)[0]

    out, sizes, t = level.below(below)
    return level.pair(out, t), sizes
