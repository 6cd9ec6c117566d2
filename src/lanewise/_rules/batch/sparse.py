"""Products of captured sparse matrices with lanes: one product for all lanes, which are more columns, or rows."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel
from lanewise._core.layouts import LAYOUT_RULES, alone, product_of_layouts
from lanewise._core.level import current_level
from lanewise._core.python.factories import route, unrouted
from lanewise._rules.batch.datadependent import agreed
from lanewise._rules.batch.families import lane_rule, refuse
from lanewise._rules.batch.matmul import added, scaled
from lanewise._torch_compat import OpOverload
from lanewise.errors import TransformError, at_user_line

aten = torch.ops.aten


def layout_rule(op: OpOverload) -> Callable[[Callable], Callable]:
    """A rule for an operation where an operand without lanes is sparse."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        LAYOUT_RULES[op] = fn
        return fn

    return register


_product = functools.partial(product_of_layouts, torch.mm)


@layout_rule(aten.mm.default)
def mm(level: BatchLevel, a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] sparse and b [B, k, n], or a [B, m, k] and b [k, n] sparse -> [B, m, n]"""
    if level.mapped(b):
        right = b.value
        lanes, inner, columns = right.shape
        out = _product(a, right.transpose(0, 1).reshape(inner, lanes * columns))
        return out.view(a.shape[0], lanes, columns).transpose(0, 1).contiguous()
    left = level.physical(a)
    return _product(left.flatten(0, 1), b).view(*left.shape[:2], b.shape[1])


@layout_rule(aten.mv.default)
def mv(level: BatchLevel, a: Tensor, v: Tensor) -> Tensor:
    """a [m, k] sparse, v [B, k] -> [B, m]"""
    return _product(a, level.physical(v).t()).t().contiguous()


def _addmm(level: BatchLevel, c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """c [B, m, n] or what broadcasts to it, a and b as in mm, or neither with lanes -> [B, m, n]"""
    product = mm(level, a, b) if level.mapped(a) or level.mapped(b) else _product(a, b)
    bias = level.physical(c)
    if level.mapped(c):
        bias = bias.reshape(level.size, *[1] * (2 - c.dim()), *c.shape)
    return added(bias, scaled(product, alpha), beta)


for _op in (aten.addmm.default, aten._sparse_addmm.default):
    layout_rule(_op)(_addmm)


@layout_rule(aten.add.Tensor)
def add(level: BatchLevel, x: Tensor, y: Tensor, *, alpha: Any = 1) -> Tensor:
    """x [B, *S] and y [*S] sparse -> [B, *S]; the other way round is refused, as without lanes"""
    if not level.mapped(x):
        return torch.add(x, level.physical(y)[0], alpha=alpha)
    return torch.add(x.value, y.to_dense(), alpha=alpha)


@layout_rule(aten.addmv.default)
def addmv(level: BatchLevel, c: Tensor, a: Tensor, v: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """c [B, m] or [m], a [m, k] sparse, v [B, k] or [k] -> [B, m]"""
    product = mv(level, a, v) if level.mapped(v) else torch.mv(a, v)
    bias = level.physical(c)
    bias = bias.unsqueeze(-1) if level.mapped(c) and c.dim() == 0 else bias
    return added(bias, scaled(product, alpha), beta)


refuse(
    aten._nested_tensor_from_tensor_list.default,
    "vmap: nested tensors cannot have lanes",
    "torch.nn.utils.rnn.pad_sequence(parts)  # and a mask of what is there",
)


@lane_rule(aten._nested_tensor_from_mask_left_aligned.default, raw=True)
def nested_tensor_from_mask_left_aligned(level, x, mask):
    """x [B, N, T, D], mask [B, N, T] -> whether all true entries come first, if all lanes agree"""
    lengths = level.physical(mask).sum(-1, keepdim=True)
    aligned = level.physical(mask) == (torch.arange(mask.shape[-1], device=mask.device) < lengths)
    if not level.mapped(mask):
        return bool(aligned.all())
    return agreed(level, aligned.flatten(1).all(1), "_nested_tensor_from_mask_left_aligned")


@lane_rule(aten._nested_tensor_from_mask.default, raw=True)
def nested_tensor_from_mask(level, x, mask, mask_check=True):
    """x [B, N, T, D], mask [B, N, T], of one lane -> a nested tensor, as nn.TransformerEncoder makes of padded ones"""
    x, mask = [each if level.mapped(each) else level.physical(each) for each in (x, mask)]
    return alone(level, aten._nested_tensor_from_mask.default, (x, mask, mask_check), {})


# --- kernels on captured sparse or nested tensors alone --------------------------------------------------------------


def _alone(op: OpOverload) -> Callable[..., Any]:
    """The kernel makes tensors of its own, and works on their memory: none is to be a plane's, but the result."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        out = unrouted(op, *args, **kwargs)
        level = current_level()
        # One without strides stays as it is.
        return out if level is None or type(out) is not Tensor else level.adopt(out)

    return kernel


def _has_memory(nested: Tensor) -> bool:
    """Whether the values of a nested tensor are in memory."""
    try:
        nested.values().data_ptr()
    except RuntimeError:
        return False
    return True


def _padded(*args: Any, **kwargs: Any) -> Any:
    """`to_padded_tensor`, which would read memory that a nested tensor computed inside of a transform does not have."""
    nested = args[0]
    if current_level() is not None and nested.is_nested and nested.layout is torch.strided and not _has_memory(nested):
        raise TransformError(
            at_user_line(
                f"{current_level()!r}: to_padded_tensor of a nested tensor of strided layout that was computed inside: "
                "its memory belongs to the transform",
                "torch.nested.nested_tensor(parts, layout=torch.jagged)  # or compute it outside",
            )
        )
    return _alone(aten.to_padded_tensor.default)(*args, **kwargs)


for _op in (
    aten._coalesce.default,
    aten._sparse_log_softmax.default,
    aten._sparse_softmax.default,
    aten._sparse_sparse_matmul.default,
    aten._sparse_sum.dim,
    # Nested tensors.
    aten._nested_tensor_from_mask.default,
    aten._transformer_encoder_layer_fwd.default,
):
    route(_op, _alone(_op))
route(aten.to_padded_tensor.default, _padded)
