"""Forward rules of indexing, gathering and scattering, joining and rearranging. Indices carry no tangent."""

import torch

from lanewise._rules.jvp.families import elementwise, jointly_linear, jvp_rule, linear, rule_on_plane

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
