"""Forward rules of the most used pointwise operations; the rest take torch's own formulas."""

import torch

from lanewise._rules.jvp.families import bilinear, constant, elementwise, jvp_rule

aten = torch.ops.aten

# fmt: off
elementwise(aten.cos.default, lambda t, y, x: -t * x.sin())
elementwise(aten.cosh.default, lambda t, y, x: t * x.sinh())
elementwise(aten.div.Scalar, lambda t, y, x, c: t / c)
elementwise(aten.div.Tensor, lambda t, y, a, b: t / b, lambda t, y, a, b: -t * (y / b))
elementwise(aten.exp.default, lambda t, y, x: t * y)
elementwise(aten.expm1.default, lambda t, y, x: t * (y + 1))
elementwise(aten.log.default, lambda t, y, x: t / x)
elementwise(aten.log1p.default, lambda t, y, x: t / (x + 1))
elementwise(aten.mul.Scalar, lambda t, y, x, c: t * c)
elementwise(aten.neg.default, lambda t, y, x: -t)
elementwise(aten.reciprocal.default, lambda t, y, x: -t * (y * y))
elementwise(aten.relu.default, lambda t, y, x: t * (y > 0))
elementwise(aten.rsqrt.default, lambda t, y, x: -0.5 * t * (y * y * y))
elementwise(aten.sigmoid.default, lambda t, y, x: t * (y * (1 - y)))
elementwise(aten.sin.default, lambda t, y, x: t * x.cos())
elementwise(aten.sinh.default, lambda t, y, x: t * x.cosh())
elementwise(aten.sqrt.default, lambda t, y, x: t / (2 * y))
elementwise(aten.tanh.default, lambda t, y, x: t * (1 - y * y))
# fmt: on

bilinear(aten.bmm.default, aten.dot.default, aten.mm.default, aten.mul.Tensor, aten.mv.default)
constant(
    aten.eq.Scalar,
    aten.eq.Tensor,
    aten.ge.Scalar,
    aten.ge.Tensor,
    aten.gt.Scalar,
    aten.gt.Tensor,
    aten.le.Scalar,
    aten.le.Tensor,
    aten.lt.Scalar,
    aten.lt.Tensor,
    aten.ne.Scalar,
    aten.ne.Tensor,
    aten.ones_like.default,
    aten.sign.default,
    aten.zeros_like.default,
    aten.is_same_size.default,
    aten._has_same_storage_numel.default,
)


@jvp_rule(aten.add.Tensor)
def add(level, x, y, *, alpha=1):
    """t_x + alpha t_y, broadcast to the sum"""
    out = aten.add.Tensor(level.primal(x), level.primal(y), alpha=alpha)
    return out, _combined(out, level.tangent(x), level.tangent(y), alpha)


@jvp_rule(aten.sub.Tensor)
def sub(level, x, y, *, alpha=1):
    """t_x - alpha t_y, broadcast to the difference"""
    out = aten.sub.Tensor(level.primal(x), level.primal(y), alpha=alpha)
    return out, _combined(out, level.tangent(x), level.tangent(y), -alpha)


def _combined(out, tx, ty, factor):
    if ty is None:
        total = tx
    elif tx is None:
        total = ty if factor == 1 else ty * factor
    else:
        total = torch.add(tx, ty, alpha=factor)
    if total.shape != out.shape or total.dtype is not out.dtype:
        total = total.to(out.dtype).expand(out.shape)
    return total
