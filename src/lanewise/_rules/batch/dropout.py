"""Dropout in all its forms, and the randomised leaky relu."""

from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import captured_write
from lanewise._core.level import on_plane
from lanewise._core.python.factories import route
from lanewise._rules.batch.families import leading
from lanewise._rules.batch.random import blank, plain_numbers, random_rule
from lanewise._rules.batch.same_state import from_one_state
from lanewise._torch_compat import OpOverload
from lanewise.errors import TransformError, at_user_line

aten = torch.ops.aten

# --- dropout ---------------------------------------------------------------------------------------------------------


@random_rule(aten.native_dropout.default, aten._fused_dropout.default)
def native_dropout(level, op, x, p, train=True, generator=None):
    """x [B, *S] or [*S] -> x with elements dropped and the rest scaled up, and the mask of what is kept"""
    keep = p if op is aten._fused_dropout.default else 1 - p
    below = level.physical(x)
    if train is False or keep == 1:
        kept = torch.ones(below.shape, dtype=torch.bool, device=x.device)
        return tuple((level.wrap if level.mapped(x) else level.adopt)(t) for t in (below.clone(), kept))
    lead = () if level.randomness == "same" else (level.total,)
    draws = blank(level, x, lead).bernoulli_(keep, generator=generator)
    draws = draws.narrow(0, level.start, level.size) if lead else draws
    out = below * draws * (1 / keep if keep else 0.0)
    kept = draws.to(torch.bool) if op is aten.native_dropout.default else draws.to(torch.uint8)
    put = level.wrap if lead or level.mapped(x) else level.adopt
    return put(out), level.wrap(kept) if lead else level.adopt(kept)


def _dropout(op: OpOverload) -> Any:
    """Of torch's own compositions: they draw the mask in a tensor that no routing sees."""
    name = op._schema.name
    by_channel, keeps_moments, writes = "feature" in name, "alpha" in name, name.endswith("_")

    def dropout(x: Tensor, p: float, train: bool) -> Tensor:
        if not 0 <= p <= 1:
            raise TransformError(at_user_line(f"dropout probability has to be between 0 and 1, but got {p}"))
        if not train or p == 0 or not x.numel():
            return x
        if by_channel and x.dim() < 2:
            raise TransformError(at_user_line("Feature dropout requires at least 2 dimensions in the input"))
        if p == 1:
            return x.mul_(torch.zeros((), dtype=x.dtype, device=x.device)) if writes else x * 0.0
        with torch.no_grad():
            if by_channel:
                shape = (*x.shape[:2], *[1] * (x.dim() - 2))
                noise = torch.zeros(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p)
            else:
                noise = torch.zeros_like(x).bernoulli_(1 - p)
        if not keeps_moments:
            noise = noise.div_(1 - p)
            return x.mul_(noise) if writes else x * noise
        saturation = 1.7580993408473766
        scale = 1 / ((saturation * saturation * p + 1) * (1 - p)) ** 0.5
        shift = (noise - 1) * (saturation * scale) + saturation * scale * p
        noise = noise * scale
        return x.mul_(noise).add_(shift) if writes else x * noise + shift

    return dropout


for _op in (
    aten.alpha_dropout.default,
    aten.alpha_dropout_.default,
    aten.dropout.default,
    aten.dropout_.default,
    aten.feature_alpha_dropout.default,
    aten.feature_alpha_dropout_.default,
    aten.feature_dropout.default,
    aten.feature_dropout_.default,
):
    route(_op, _dropout(_op))


# --- randomised leaky relu -------------------------------------------------------------------------------------------


def _slopes(level, x, lower, upper, generator):
    """Slopes where x is negative, ones elsewhere: [B, *S] or, if all lanes have the same, [*S]"""
    below = level.physical(x)
    negative = below <= 0
    if level.randomness == "different":
        draws = blank(level, x, (level.total,)).uniform_(lower, upper, generator=generator)
        return torch.where(negative, draws.narrow(0, level.start, level.size), 1)
    # torch draws doubles, and only where x is negative: the k-th negative element gets the k-th number.
    count = _same_count(negative, x.dim())
    if count is None:
        op = aten.rrelu_with_noise_functional.default
        given = level.alias(x), torch.ones(x.shape, dtype=x.dtype, device=x.device), lower, upper, True
        return from_one_state(level, op, given, {"generator": generator})[1]
    if not count:
        return torch.ones_like(below)
    draws = torch.zeros(count, dtype=torch.float64, device=x.device).uniform_(lower, upper, generator=generator)
    flat = negative.reshape(*below.shape[: below.dim() - x.dim()], x.numel())
    order = (flat.cumsum(-1) - 1).clamp_min(0)
    return torch.where(negative, draws.to(x.dtype)[order].view(below.shape), 1)


def _same_count(negative: Tensor, rank: int) -> int | None:
    """How many elements [*lanes, *S] are True in each lane; None where that differs."""
    with on_plane(None):
        each = plain_numbers(negative).flatten(-rank).sum(-1) if rank else plain_numbers(negative).long()
        first = int(each.flatten()[0]) if each.numel() else 0
        return first if bool((each == first).all()) else None


@random_rule(aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default, aten.rrelu_with_noise_functional.default)
def rrelu_with_noise(level, op, x, noise, lower=0.125, upper=1 / 3, training=False, generator=None):
    """x [B, *S], noise [B, *S] <- the slopes that were drawn -> [B, *S]"""
    slopes = _slopes(level, x, lower, upper, generator) if training else None
    below = level.physical(x)
    lanes = level.mapped(x) or (slopes is not None and slopes.dim() > x.dim())
    out = below * slopes if slopes is not None else torch.nn.functional.leaky_relu(below, (lower + upper) / 2)
    put = level.wrap if lanes else level.adopt
    if op is aten.rrelu_with_noise_functional.default:
        return put(out), put(slopes) if slopes is not None else noise
    if slopes is not None:
        _write(level, op, noise, slopes, lanes, "noise")
    if op is aten.rrelu_with_noise_.default:
        _write(level, op, x, out, lanes, "self")
        return x
    return put(out)


def _write(level, op, target, value, lanes, name):
    if not level.owns(target):
        if lanes:
            raise captured_write(op, name, target)
        target.copy_(value)
    else:
        target.value.copy_(value)


def _rrelu(x: Tensor, lower: Any = 0.125, upper: Any = 1 / 3, training: bool = False, generator: Any = None) -> Tensor:
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    return aten.rrelu_with_noise(x, torch.zeros_like(x), lower, upper, training, generator)


def _rrelu_(x: Tensor, lower: Any = 0.125, upper: Any = 1 / 3, training: bool = False, generator: Any = None) -> Tensor:
    if not training:
        return torch.nn.functional.leaky_relu_(x, (lower + upper) / 2)
    return aten.rrelu_with_noise_(x, torch.zeros_like(x), lower, upper, training, generator)


route(aten.rrelu.default, _rrelu)
route(aten.rrelu_.default, _rrelu_)
leading(aten.rrelu_with_noise_backward.default)
