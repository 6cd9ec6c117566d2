"""Derivatives of derivatives: operations whose formula in torch is wrong at a higher order, written out instead.

torch.autograd gives wrong numbers for the second derivative of `_weight_norm`, and for the third of `layer_norm` and
`batch_norm` (so of instance norm too). Inside `grad`, `vjp` and the like, weight norm is a composition of simpler
operations, whose derivatives are right at every order, and inside nested ones the other two are as well. The kernels
sit on a dispatch key that is switched on for that time.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._torch_compat import (
    ORDER_KEY,
    ORDER_KEY_NAME,
    ORDER_KEY_SET,
    ExcludeDispatchKeyGuard,
    include_key,
    never_compile,
)

aten = torch.ops.aten


class _Depth(threading.local):
    """How many reverse passes are being recorded, one inside another."""

    now = 0


_depth = _Depth()
_fallthrough = torch.library.Library("_", "IMPL")
_fallthrough.fallback(torch.library.fallthrough_kernel, ORDER_KEY_NAME)
_kernels = torch.library.Library("aten", "IMPL")


def one_order_more() -> None:
    """A reverse pass begins to record."""
    _depth.now += 1
    if _depth.now == 1:
        include_key(ORDER_KEY, True)


def one_order_less() -> None:
    """It has recorded."""
    _depth.now -= 1
    if _depth.now == 0:
        include_key(ORDER_KEY, False)


def _written_out(op: Any, depth: int) -> Callable[[Callable], Callable]:
    """Register what stands for an operation in so many nested reverse passes and more."""

    def register(compose: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            with ExcludeDispatchKeyGuard(ORDER_KEY_SET):
                return (op if _depth.now < depth else compose)(*args, **kwargs)

        never_compile(run)
        _kernels.impl(op.name().removeprefix("aten::"), run, ORDER_KEY_NAME)
        return compose

    return register


def _normalized(x: Tensor, dims: list[int], eps: float) -> Tensor:
    """`(x - mean) / sqrt(var + eps)` along dims; half precision is computed in single, as the kernels do."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    centred = wide - wide.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


@_written_out(aten.layer_norm.default, depth=2)
def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    """x [*N, *S], weight [*S], bias [*S] -> [*N, *S]"""
    if tuple(x.shape[x.dim() - len(normalized_shape) :]) != tuple(normalized_shape):
        return torch.layer_norm(x, normalized_shape, weight, bias, eps, cudnn_enable)
    out = _normalized(x, list(range(-len(normalized_shape), 0)), eps)
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(x.dtype)


@_written_out(aten.batch_norm.default, depth=2)
def batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled):
    """x [N, C, *S], all others [C] -> [N, C, *S]"""
    if not training or x.numel() == 0:
        return torch.batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
    if running_mean is not None:
        # For what it writes into the running statistics.
        with torch.no_grad():
            torch.batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
    channels = [1, -1] + [1] * (x.dim() - 2)
    out = _normalized(x, [0, *range(2, x.dim())], eps)
    out = out if weight is None else out * weight.reshape(channels)
    return (out if bias is None else out + bias.reshape(channels)).to(x.dtype)


@_written_out(aten._weight_norm.default, depth=1)
def weight_norm(v, g, dim=0):
    """v [*S], g with size 1 but for `dim` -> v g / |v|, the norm over all dims but `dim`"""
    return v * (g / torch.norm_except_dim(v, 2, dim))


@_written_out(aten._cdist_forward.default, depth=2)
def cdist(a, b, p, mode=None):
    """a [*N, M, D], b [*N, R, D] -> the distances [*N, M, R]; the gradient of torch's own has no derivative"""
    return torch.linalg.vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, -1)


@_written_out(aten._pdist_forward.default, depth=2)
def pdist(x, p=2.0):
    """x [N, D] -> the distances of all pairs [N (N - 1) / 2]"""
    first, second = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device).unbind(0)
    return torch.linalg.vector_norm(x[first] - x[second], p, -1)
