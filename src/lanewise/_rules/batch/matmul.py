"""Matrix products."""

from functools import reduce

import torch

from lanewise._core.batch import BATCH_RULES
from lanewise._core.short.hot import route
from lanewise._core.short.paths import operands_path, paired_path
from lanewise._rules.batch.families import HALF, decompose, lane_rule
from lanewise.errors import TransformError, at_user_line

aten = torch.ops.aten


FEW = 16  # columns


def product(a, b, bias=None, beta=1, alpha=1):
    """a [B, m, k], b [B, k, n], bias [B, m, n] or what broadcasts to it -> alpha a b + beta bias, [B, m, n]

    The matrix library takes up to 9 times as long for few columns as for few rows, so these are made rows and the
    result is turned back. It is copied, for one lane's result is contiguous too.
    """
    columns = b.shape[2]
    few = columns < FEW and 2 * columns <= a.shape[1] and type(a) is type(b) is torch.Tensor
    if not (few and a.is_cpu and a.numel() >= 4096):
        return torch.bmm(a, b) if bias is None else torch.baddbmm(bias, a, b, beta=beta, alpha=alpha)
    if bias is None:
        return torch.bmm(b.mT, a.mT).mT.contiguous()
    turned = bias.mT if bias.dim() > 1 else bias.unsqueeze(-1)
    return torch.baddbmm(turned, b.mT, a.mT, beta=beta, alpha=alpha).mT.contiguous()


def _check_ranks(text, *operands):
    if any(operand.dim() != rank for operand, rank in operands):
        raise TransformError(at_user_line(f"{text}, got {' and '.join(str(list(x.shape)) for x, _ in operands)}"))


@lane_rule(aten.mm.default, guarded=False)
def mm(level, a, b):
    """a [B, m, k] or [m, k], b [B, k, n] or [k, n] -> [B, m, n]"""
    if not level.mapped(b):
        return lanes_times_matrix(a.value, b)
    if not level.mapped(a):
        return matrix_times_lanes(level.physical(a), b.value)
    return product_of_lanes(a.value, b.value)


def lanes_times_matrix(a, b):
    """a [B, m, k], b [k, n] -> [B, m, n]"""
    lanes, rows, inner = a.shape
    if rows >= FEW and inner > 1 and a.stride(1) == 1:
        # Rows are turned to the side in memory (the backward pass of a layer): a copy would cost more.
        return torch.bmm(a, b.expand(lanes, inner, b.shape[1]))
    return torch.mm(a.reshape(lanes * rows, inner), b).view(lanes, rows, b.shape[1])


def matrix_times_lanes(a, b):
    """a [m, k], b [B, k, n] -> [B, m, n]"""
    if b.shape[2] == 1:
        return torch.mm(b.squeeze(2), a.t()).unsqueeze(2)
    return product(a.expand(b.shape[0], *a.shape), b)


def product_of_lanes(a, b):
    """a [B, m, k], b [B, k, n] -> [B, m, n]"""
    # One column times one row: plain multiplication, 1.1 to 3 times faster than a batched product of depth one.
    return a * b if a.shape[2] == 1 == b.shape[1] else product(a, b)


@lane_rule(aten.bmm.default, guarded=False)
def bmm(level, a, b):
    """a [B, N, m, k], b [B, N, k, n], either without B -> [B, N, m, n]

    Lanes of one operand become its rows or columns, unless copying them there moves more than a copy of the other.
    """
    _check_ranks("batch1 and batch2 must be 3D tensors", (a, 3), (b, 3))
    lanes, images = level.size, a.shape[0]
    rows, inner, columns = a.shape[1], a.shape[2], b.shape[2]
    if not level.mapped(b) and rows <= columns:
        folded = a.value.transpose(0, 1).reshape(images, lanes * rows, inner)
        return torch.bmm(folded, b).view(images, lanes, rows, columns).transpose(0, 1)
    if not level.mapped(a) and columns <= rows:
        folded = b.value.permute(1, 2, 0, 3).reshape(images, inner, lanes * columns)
        # Copied, as a user may ask for a view of what is contiguous for one lane.
        return torch.bmm(a, folded).view(images, rows, lanes, columns).permute(2, 0, 1, 3).contiguous()
    return torch.matmul(level.physical(a), level.physical(b))


@lane_rule(aten.mv.default, guarded=False)
def mv(level, a, v):
    """a [B, m, k] or [m, k], v [B, k] or [k] -> [B, m]"""
    if not level.mapped(a):
        return torch.mm(v.value, a.t())
    if not level.mapped(v):
        if a.dim() != 2 or v.dim() != 1:
            raise ValueError  # the message is that of one lane
        return torch.matmul(a.value, v)
    # A row times a matrix takes a third of the time of a matrix times a column.
    return torch.bmm(v.value.unsqueeze(1), a.value.mT).squeeze(1)


def _dotted(level, a, b):
    """The operands of a product of vectors, which are as those of one lane must be."""
    if a.dim() != 1 or b.dim() != 1:
        _check_ranks("1D tensors expected", (a, 1), (b, 1))
    if a.shape != b.shape or a.dtype is not b.dtype:
        raise TransformError(
            at_user_line(
                f"inconsistent tensor size: dot of {list(a.shape)} {a.dtype} and {list(b.shape)} {b.dtype}",
                "(a * b).sum()  # where one is to be broadcast",
            )
        )
    left, right = level.physical(a), level.physical(b)
    if a.dtype is torch.bool:
        torch.dot(left.new_ones(1), right.new_ones(1))  # raises, as it does for an example
    return left, right


def dots(a, b):
    """a [B, n], b [B, n] of floating point -> [B]"""
    if a.dtype in HALF:
        # It would round each product.
        return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).view(-1)
    return torch.linalg.vecdot(a, b)


@lane_rule(aten.dot.default, guarded=False)
def dot(level, a, b):
    """a [B, n] or [n], b [B, n] or [n] -> [B]"""
    left, right = _dotted(level, a, b)
    if not a.is_floating_point():
        return (left * right).sum(1, dtype=a.dtype)
    if not level.mapped(a):
        return torch.mv(right, left)
    return dots(left, right) if level.mapped(b) else torch.mv(left, right)


route(
    aten.dot.default,
    paired_path(
        torch.linalg.vecdot,
        1,
        frozenset({torch.float32, torch.float64}),  # for which `dots` takes it
        operands_path(BATCH_RULES[aten.dot.default]),
    ),
)


@lane_rule(aten.vdot.default)
def vdot(level, a, b):
    """a [B, n] or [n], b [B, n] or [n] -> [B], the first conjugated"""
    left, right = _dotted(level, a, b)
    if a.dtype in HALF:
        return dots(*torch.broadcast_tensors(left, right))
    return (left.conj_physical() * right).sum(1, dtype=a.dtype)


@lane_rule(aten._trilinear.default)
def trilinear(level, a, b, c, expand_a, expand_b, expand_c, sum_dims, unroll_dim=1):
    """a, b, c [B, *S], all of one rank once their dims in expand_* are put in -> [B, *S without sum_dims]

    The lanes are one more dim to put into an operand that has none.
    """
    operands = (a, b, c)
    expand = [
        [dim + 1 for dim in dims] if level.mapped(t) else [0, *[dim + 1 for dim in dims]]
        for t, dims in zip(operands, (expand_a, expand_b, expand_c), strict=True)
    ]
    values = [level.physical(t) for t in operands]
    return aten._trilinear.default(*values, *expand, [dim + 1 for dim in sum_dims], unroll_dim + 1)


def scaled(x, factor):
    """factor * x without an operation where the factor is one."""
    return x if isinstance(factor, int | float) and factor == 1 else x * factor


def added(bias, product, beta):
    """beta * bias + product; as torch does, a beta of zero drops the bias, NaNs and all."""
    if isinstance(beta, int | float) and beta == 0:
        return product
    return scaled(bias, beta) + product


@lane_rule(aten.addmm.default, guarded=False)
def addmm(level, c, a, b, *, beta=1, alpha=1):
    """c [B, n], [B, m, n] or without B, a [B, m, k] or [m, k], b [B, k, n] or [k, n] -> [B, m, n]"""
    if not level.mapped(b) and not level.mapped(c) and c.dim() < 2:
        left = a.value
        lanes, rows, inner = left.shape
        flat = torch.addmm(c, left.reshape(lanes * rows, inner), b, beta=beta, alpha=alpha)
        return flat.view(lanes, rows, b.shape[1])
    bias = level.physical(c)
    if level.mapped(c) and c.dim() < 2:
        bias = bias.reshape(level.size, *([1] * (2 - c.dim())), *c.shape)
    return product(level.expanded(a), level.expanded(b), bias, beta, alpha)


@lane_rule(aten.baddbmm.default, guarded=False)
def baddbmm(level, c, a, b, *, beta=1, alpha=1):
    """c [B, N, m, n] or what broadcasts to it, a [B, N, m, k], b [B, N, k, n], any without B -> [B, N, m, n]"""
    _check_ranks("batch1 and batch2 must be 3D tensors", (a, 3), (b, 3))
    bias = level.physical(c)
    if level.mapped(c) and c.dim() < 3:
        bias = bias.reshape(level.size, *([1] * (3 - c.dim())), *c.shape)
    if _rounds_once(a):
        left, right = level.expanded(a), level.expanded(b)
        shape = (*left.shape[:3], right.shape[3])
        flat = bias.expand(shape).flatten(0, 1)
        out = torch.baddbmm(flat, left.flatten(0, 1), right.flatten(0, 1), beta=beta, alpha=alpha)
        return out.view(shape)
    return added(bias, scaled(torch.matmul(level.physical(a), level.physical(b)), alpha), beta).contiguous()


def _rounds_once(x):
    """Whether torch adds a product before it rounds the sum: a product of its own would be rounded, or of int64."""
    return x.dtype in HALF or not (x.is_floating_point() or x.is_complex())


def _added_once(c, product, beta):
    """`added` for a bias that has no more entries than the product."""
    return added(c if c.shape == product.shape else c.expand(product.shape), product, beta)


def _addmv(c, a, b, *, beta=1, alpha=1):
    _check_ranks("addmv: a matrix and a vector expected", (a, 2), (b, 1))
    if _rounds_once(a):
        column = c.unsqueeze(-1) if c.dim() else c
        return torch.addmm(column, a, b.unsqueeze(1), beta=beta, alpha=alpha).squeeze(1)
    return _added_once(c, scaled(a @ b, alpha), beta)


def _addbmm(c, a, b, *, beta=1, alpha=1):
    _check_ranks("batch1 and batch2 must be 3D tensors", (a, 3), (b, 3))
    if _rounds_once(a):
        for left, right in zip(a.unbind(0), b.unbind(0), strict=True):
            c, beta = torch.addmm(c, left, right, beta=beta, alpha=alpha), 1
        return c
    return _added_once(c, scaled((a @ b).sum(0), alpha), beta)


def _addr(c, a, b, *, beta=1, alpha=1):
    _check_ranks("addr: Expected 1-D arguments", (a, 1), (b, 1))
    # Of no dims, too, it counts as a matrix.
    dtype = reduce(torch.promote_types, (c.dtype, a.dtype, b.dtype))
    c, a, b = c.to(dtype), a.to(dtype), b.to(dtype)
    if dtype is torch.bool:
        outer = (a[:, None] & b) & bool(alpha)
        return (c & bool(beta)) | outer
    if dtype in HALF:
        beta, alpha = (torch.tensor(factor, dtype=dtype).item() for factor in (beta, alpha))
    return _added_once(c, scaled(a, alpha)[:, None] * b, beta)


decompose(aten.addmv.default, _addmv)
decompose(aten.addbmm.default, _addbmm)
decompose(aten.addr.default, _addr)
