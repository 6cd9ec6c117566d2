"""Layers whose parameters are the same in all lanes, but differentiated for each: per-sample gradients.

Where gradients are recorded below the lanes (recorded.py), such a parameter is one tensor expanded over the lanes,
`[B, *S]` with a stride of zero. A layer then computes with the one there is, for all lanes at once, and its backward
pass gives the gradient of each lane.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from lanewise._rules.batch.conv import convolution_of_lanes, weight_gradient_of_lanes
from lanewise._rules.batch.matmul import product
from lanewise._rules.batch.norm import group_norm_backward_of_lanes
from lanewise._torch_compat import (
    BATCHED_KEY,
    apply_plainly,
    dispatch_keys_of,
    dispatch_mode_count,
    forward_level,
    is_grad_enabled,
)

aten = torch.ops.aten

# As it is now: what others put in its place later calls it, and so comes here.
linear_of_torch = torch.nn.functional.linear


def is_spread(value: Any) -> bool:
    """Whether `[B, *S]` on the plane below is one tensor, repeated without a copy, as one lane's own is."""
    if type(value) is not Tensor or not value.dim() or value.is_complex():
        return False
    lanes = value.shape[0]
    return lanes == 1 or (lanes > 0 and value.stride(0) == 0)


def unseen() -> bool:
    """Whether neither torch's forward mode nor a dispatch mode sees what is done on the plane below."""
    return forward_level() < 0 and not dispatch_mode_count()


class Layer:
    """A layer of x `[B, *S]` and of parameters, each `[*S]`, `[B, *S]` or None.

    Attributes:
        options: What else it is given.
    """

    __slots__ = ("options",)

    def __init__(self, *options: Any) -> None:
        self.options = options

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, tuple]:
        """The result, with parameters that have no lanes, and what else the backward pass needs."""
        raise NotImplementedError

    def backward(self, wanted: Sequence[bool], cotangent: Tensor, kept: tuple, x: Tensor, *parameters: Any) -> tuple:
        """The gradients that are wanted in x and, for each lane, in the parameters."""
        raise NotImplementedError

    def composed(self, x: Tensor, *parameters: Tensor | None) -> Tensor:
        """The result of operations that autograd differentiates as often as it is asked to."""
        raise NotImplementedError


def apply(layer: Layer, x: Tensor, *parameters: Tensor | None) -> Tensor:
    """The result of a layer some of whose parameters `[B, *S]` are one tensor, on the lowest plane."""
    if is_grad_enabled() and (x.requires_grad or any(p is not None and p.requires_grad for p in parameters)):
        return apply_plainly(_Spread, layer, x, *parameters)
    return layer.forward(x, *map(_one, parameters))[0]


def _one(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter[0]


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, x: Tensor, *parameters: Tensor | None) -> Tensor:  # type: ignore[override]
        out, kept = layer.forward(x, *map(_one, parameters))
        ctx.layer = layer
        ctx.kept = len(kept)
        ctx.save_for_backward(x, *parameters, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple:  # type: ignore[override]
        saved = ctx.saved_tensors
        count = len(saved) - ctx.kept
        inputs, kept = saved[:count], saved[count:]
        wanted = ctx.needs_input_grad[1:]
        # To cotangents of `is_grads_batched`, torch applies few operations besides the formulas of its own.
        if not is_grad_enabled() and not dispatch_keys_of(cotangent).has(BATCHED_KEY):
            return None, *ctx.layer.backward(wanted, cotangent, kept, inputs[0], *map(_one, inputs[1:]))
        with torch.enable_grad():
            # Aliases: one may have been computed from another, and the derivative in that goes no further than here.
            aliases = [x.view_as(x) if needed else x for x, needed in zip(inputs, wanted, strict=True)]
            out = ctx.layer.composed(*aliases)
        chosen = [x for x, needed in zip(aliases, wanted, strict=True) if needed]
        found = iter(torch.autograd.grad(out, chosen, cotangent, create_graph=is_grad_enabled()))
        return None, *[next(found) if needed else None for needed in wanted]


def rows_of(x: Tensor) -> Tensor:
    """[B, *S, n] -> [B, s, n]"""
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


def for_own_weight(cotangent: Tensor, x: Tensor) -> Tensor:
    """cotangent [B, *S, m], x [B, *S, n] -> [B, m, n]"""
    left, right = rows_of(cotangent).mT, rows_of(x)
    # One row: plain multiplication, 1.1 to 3 times faster than a batched product of depth one.
    return left * right if right.shape[1] == 1 else product(left, right)


class Embedding(Layer):
    """x [B, *I], weight [V, D] -> [B, *I, D]; its option is the index whose row gets no gradient, or -1."""

    __slots__ = ()

    def forward(self, x, weight):
        return torch.embedding(weight, x), ()

    def backward(self, wanted, cotangent, kept, x, weight):
        (padding,) = self.options
        lanes, rows = x.shape[0], weight.shape[0]
        if padding >= 0:
            cotangent = cotangent.masked_fill((x == padding).unsqueeze(-1), 0)
        out = aten.embedding_dense_backward(cotangent, shifted(x, rows), lanes * rows, -1, False)
        return None, out.view(lanes, *weight.shape)

    def composed(self, x, weight):
        (padding,) = self.options
        rows = weight.flatten(0, 1)[shifted(x, weight.shape[1])]
        return rows if padding < 0 else torch.where((x == padding).unsqueeze(-1), rows.detach(), rows)


def shifted(indices: Tensor, rows: int) -> Tensor:
    """indices [B, *I] into a table of each lane -> into all tables, one below the other"""
    offsets = torch.arange(indices.shape[0], dtype=indices.dtype, device=indices.device) * rows
    return indices + offsets.view(-1, *[1] * (indices.dim() - 1))


class Linear(Layer):
    """x [B, *S, n], weight [m, n], bias [m] -> [B, *S, m]"""

    __slots__ = ()

    def forward(self, x, weight, bias):
        return linear_of_torch(x, weight, bias), ()

    def backward(self, wanted, cotangent, kept, x, weight, bias):
        grad_x = grad_weight = grad_bias = None
        if wanted[0]:
            grad_x = torch.matmul(cotangent, weight)
        if wanted[1]:
            grad_weight = for_own_weight(cotangent, x)
        if wanted[2]:
            grad_bias = rows_of(cotangent).sum(1)
        return grad_x, grad_weight, grad_bias

    def composed(self, x, weight, bias):
        out = product(rows_of(x), weight.mT, None if bias is None else bias.unsqueeze(1))
        return out.view(*x.shape[:-1], weight.shape[1])


class Convolution(Layer):
    """x [B, N, C, *sp], weight [D, C / groups, *k], bias [D] -> [B, N, D, *sp_out]

    Its options are those of `aten.convolution` from the stride to the number of groups.
    """

    __slots__ = ()

    def forward(self, x, weight, bias):
        out = torch.convolution(x.flatten(0, 1), weight, bias, *self.options)
        return out.view(*x.shape[:2], *out.shape[1:]), ()

    def backward(self, wanted, cotangent, kept, x, weight, bias):
        *options, groups = self.options
        grad_x = grad_weight = grad_bias = None
        if wanted[0]:
            shapes = cotangent.flatten(0, 1), x.new_empty(1).expand(x.shape[0] * x.shape[1], *x.shape[2:])
            mask = [True, False, False]
            grad_x = aten.convolution_backward(*shapes, weight, None, *options, groups, mask)[0].view(x.shape)
        if wanted[1]:
            grad_weight = weight_gradient_of_lanes(cotangent, x, weight.shape, options, groups)
        if wanted[2]:
            grad_bias = cotangent.sum([1, *range(3, cotangent.dim())])
        return grad_x, grad_weight, grad_bias

    def composed(self, x, weight, bias):
        *options, groups = self.options
        out = convolution_of_lanes(x, weight, options, groups)
        return out if bias is None else out + bias.view(bias.shape[0], 1, -1, *[1] * (x.dim() - 3))


def normalized(x: Tensor, dims: list[int], eps: float) -> Tensor:
    """`(x - mean) / sqrt(var + eps)` along dims; half precision is computed in single, as the kernels do.

    (The third derivatives of torch's kernels are wrong.)
    """
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    centred = wide - wide.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


class LayerNorm(Layer):
    """x [B, *S, *shape], weight and bias [*shape] -> [B, *S, *shape]; its options are the shape and the epsilon."""

    __slots__ = ()

    def forward(self, x, weight, bias):
        shape, eps = self.options
        out, *kept = torch.native_layer_norm(x, shape, weight, bias, eps)
        return out, tuple(kept)

    def backward(self, wanted, cotangent, kept, x, weight, bias):
        shape, _ = self.options
        mean, rstd = kept
        outer = list(range(1, x.dim() - len(shape)))
        grad_x = grad_weight = grad_bias = None
        if wanted[0]:
            mask = [True, False, False]
            grad_x = aten.native_layer_norm_backward(cotangent, x, shape, mean, rstd, weight, None, mask)[0]
        if wanted[1]:
            product = (x - mean).mul_(rstd).mul_(cotangent)
            grad_weight = product.sum(outer) if outer else product
        if wanted[2]:
            grad_bias = cotangent.sum(outer) if outer else cotangent
        return grad_x, grad_weight, grad_bias

    def composed(self, x, weight, bias):
        shape, eps = self.options
        ones = [1] * (x.dim() - 1 - len(shape))
        out = normalized(x, list(range(x.dim() - len(shape), x.dim())), eps).to(x.dtype)
        out = out if weight is None else out * weight.view(weight.shape[0], *ones, *shape)
        return out if bias is None else out + bias.view(bias.shape[0], *ones, *shape)


class GroupNorm(Layer):
    """x [B, N, C, *sp], weight and bias [C] -> [B, N, C, *sp]; its options are the number of groups and the epsilon."""

    __slots__ = ()

    def forward(self, x, weight, bias):
        groups, eps = self.options
        value = x.flatten(0, 1).contiguous()
        sizes = [*value.shape[:2], value[0, 0].numel(), groups]
        # The kernel reads memory without looking at strides.
        dense = [None if each is None else each.contiguous() for each in (weight, bias)]
        out, *kept = aten.native_group_norm(value, *dense, *sizes, eps)
        return out.view(x.shape), tuple(t.view(*x.shape[:2], groups) for t in kept)

    def backward(self, wanted, cotangent, kept, x, weight, bias):
        mean, rstd = kept
        return group_norm_backward_of_lanes(cotangent, x, mean, rstd, weight, self.options[0], list(wanted))

    def composed(self, x, weight, bias):
        groups, eps = self.options
        ones = [1] * (x.dim() - 3)
        grouped = x.unflatten(2, (groups, -1))
        out = normalized(grouped, list(range(3, grouped.dim())), eps).view(x.shape).to(x.dtype)
        out = out if weight is None else out * weight.view(weight.shape[0], 1, -1, *ones)
        return out if bias is None else out + bias.view(bias.shape[0], 1, -1, *ones)
