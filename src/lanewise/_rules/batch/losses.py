"""Losses. A reduction of one lane is a reduction over all dims but the lanes, so each runs once without its own
reduction, over all lanes."""

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel
from lanewise._core.missing import lane_loop
from lanewise._core.python.factories import route, unrouted
from lanewise._rules.batch.families import bind, decompose, lane_rule
from lanewise._rules.batch.operands import aligner, common_shape
from lanewise._torch_compat import fast_binding

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2


def reduced(losses: Tensor, reduction: int) -> Tensor:
    """losses [B, *S] -> [B], or as they are"""
    if reduction == NONE:
        return losses
    if losses.dim() == 1:
        return losses
    flat = losses.flatten(1) if losses.dim() > 2 else losses
    return flat.mean(1) if reduction == MEAN else flat.sum(1)


def spread(level: BatchLevel, grad: Tensor, reduction: int, rank: int, count: int) -> Tensor:
    """The gradient of a reduced loss, [B] or [] -> of each of its `count` terms, [B, 1, ...] with `rank` dims."""
    below = level.physical(grad)
    if reduction == NONE:
        return below
    if level.mapped(grad):
        below = below.view(level.size, *[1] * rank)
    return below / count if reduction == MEAN else below


def _broadcast_tensors(tensors: list[Tensor]) -> list[Tensor]:
    """Losses broadcast their operands first; those of one shape are that already."""
    if all(tensor.shape == tensors[0].shape for tensor in tensors):
        return tensors
    return unrouted(aten.broadcast_tensors.default, tensors)


route(aten.broadcast_tensors.default, _broadcast_tensors)


# --- one term per element --------------------------------------------------------------------------------------------


def _elementwise(op):
    """A loss of (input, target[, weights], reduction, ...)."""
    at = [arg.name for arg in op._schema.arguments].index("reduction")
    call = fast_binding(op)

    @lane_rule(op)
    def loss(level, *args, **kwargs):
        """input, target [B, *S] -> [B] or [B, *S]"""
        bound, rest = bind(op, args, kwargs)
        tensors = [arg for arg in bound if isinstance(arg, Tensor)]
        shape, dtype = tensors[0].shape, tensors[0].dtype
        if all(t.dtype is dtype and t.shape == shape for t in tensors):
            reduction, bound[at] = bound[at], NONE
            values = [level.expanded(arg) if isinstance(arg, Tensor) else arg for arg in bound]
            return reduced(call(*values, **rest), reduction)
        full = (level.size, *common_shape(*tensors))
        # The logits of one example are computed in the dtype of their targets, of no dims, too.
        align = aligner(level, tensors, promote=any(t.shape != tensors[0].shape for t in tensors))
        reduction, bound[at] = bound[at], NONE
        # Of one shape, because the formulas of the derivative do not broadcast.
        losses = op(*[align(arg).expand(full) if isinstance(arg, Tensor) else arg for arg in bound], **rest)
        return reduced(losses, reduction)


def _elementwise_backward(op):
    """Its backward: (grad, input, target[, weights], reduction, ...)."""
    at = [arg.name for arg in op._schema.arguments].index("reduction")

    @lane_rule(op)
    def backward(level, grad, *args, **kwargs):
        """grad [B] or [B, *S], input, target [B, *S] -> [B, *S]

        The formula of its own derivative gives grad the full shape for a reduced loss, too.
        """
        bound, rest = bind(op, (grad, *args), kwargs)
        tensors = [arg for arg in bound[1:] if isinstance(arg, Tensor)]
        shape = common_shape(*tensors)
        full_grad = bound[at] == NONE or grad.dim() > 0
        align = aligner(level, [*tensors, *([grad] if full_grad else [])], promote=False)
        if full_grad:
            bound[0] = align(grad) / max(shape.numel(), 1) if bound[at] == MEAN else align(grad)
        else:
            bound[0] = spread(level, grad, bound[at], len(shape), max(shape.numel(), 1))
        bound[at] = NONE
        values = [align(arg) if isinstance(arg, Tensor) else arg for arg in bound[1:]]
        # The formulas take a gradient of the full shape, lanes included.
        full = (level.size, *shape)
        return op(bound[0].expand(full), *[v.expand(full) if isinstance(v, Tensor) else v for v in values], **rest)


for _op in (
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.huber_loss.default,
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
):
    _elementwise(_op)
for _op in (
    aten.binary_cross_entropy_backward.default,
    aten.huber_loss_backward.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.soft_margin_loss_backward.default,
):
    _elementwise_backward(_op)


# --- negative log likelihood -----------------------------------------------------------------------------------------


def _rows(level: BatchLevel, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, (N,) C, *S], target [B, (N,) *S] -> with the lanes folded into N"""
    if target.dim() == 0 or x.dim() == 1:
        return level.expanded(x), level.expanded(target).reshape(level.size)
    return level.expanded(x).flatten(0, 1), level.expanded(target).flatten(0, 1)


def _target_weights(level, weight, target, ignore_index, like):
    """The weight of each target, zero where it is ignored: [B, *target]"""
    kept = target != ignore_index
    if weight is None:
        return kept.to(like.dtype)
    safe = torch.where(kept, target, 0)
    if level.mapped(weight):
        picked = weight.value.gather(1, safe.flatten(1) if safe.dim() > 1 else safe.unsqueeze(1)).view(safe.shape)
    else:
        picked = weight[safe]
    return torch.where(kept, picked, 0)


def _nll_forward(op):
    @lane_rule(op)
    def forward(level, x, target, weight, reduction, ignore_index):
        """x [B, (N,) C, *S], target [B, (N,) *S], weight [B, C] or [C] -> loss [B] or [B, *target], total weight [B]"""
        rows, targets = _rows(level, x, target)
        shared = None if level.mapped(weight) else weight
        losses, none = op(rows, targets, shared, NONE, ignore_index)
        each = target.shape if x.dim() > 1 else ()
        losses = losses.view(level.size, *each)
        targets = targets.view(losses.shape)
        if level.mapped(weight):
            losses = losses * _target_weights(level, weight, targets, ignore_index, x)
        if reduction == NONE:
            return losses, none.expand(level.size)
        total = _target_weights(level, weight, targets, ignore_index, x)
        if losses.dim() > 1:
            losses, total = losses.flatten(1).sum(1), total.flatten(1).sum(1)
        return (losses / total if reduction == MEAN else losses), total


def _nll_backward(op):
    @lane_rule(op)
    def backward(level, grad, x, target, weight, reduction, ignore_index, total_weight):
        """grad [B] or [B, *target], x [B, (N,) C, *S] -> [B, (N,) C, *S]"""
        rows, targets = _rows(level, x, target)
        each = target.shape if x.dim() > 1 else ()
        below = level.expanded(grad)
        if reduction == MEAN:
            below = below / level.expanded(total_weight)
        if reduction != NONE:
            below = below.view(level.size, *[1] * len(each)).expand(level.size, *each)
        if level.mapped(weight):
            below = below * _target_weights(level, weight, targets.view(below.shape), ignore_index, x)
            weight = None
        # Alike in all rows, so one number stands for the weight of an ignored mean.
        below = below.reshape(targets.shape).contiguous()
        return op(below, rows, targets, weight, NONE, ignore_index, rows.new_zeros(())).view(level.size, *x.shape)


_nll_forward(aten.nll_loss_forward.default)
_nll_forward(aten.nll_loss2d_forward.default)
_nll_backward(aten.nll_loss_backward.default)
_nll_backward(aten.nll_loss2d_backward.default)


# --- margins ---------------------------------------------------------------------------------------------------------


@lane_rule(aten.multi_margin_loss.default)
def multi_margin_loss(level, x, target, p=1, margin=1, weight=None, reduction=MEAN):
    """x [B, (N,) C], target [B, (N,)], weight [B, C] or [C] -> [B] or [B, N]"""
    if level.mapped(weight) or not x.dim():
        return lane_loop(level, aten.multi_margin_loss.default, (x, target, p, margin, weight, reduction), {})
    rows, targets = _rows(level, x, target)
    losses = aten.multi_margin_loss(rows, targets, p, margin, weight, NONE)
    return reduced(losses.view(level.size, *(target.shape if x.dim() > 1 else ())), reduction)


@lane_rule(aten.multi_margin_loss_backward.default)
def multi_margin_loss_backward(level, grad, x, target, p, margin, weight=None, reduction=MEAN):
    """grad [B] or [B, N], x [B, (N,) C] -> [B, (N,) C]"""
    if level.mapped(weight) or not x.dim():
        op = aten.multi_margin_loss_backward.default
        return lane_loop(level, op, (grad, x, target, p, margin, weight, reduction), {})
    rows, targets = _rows(level, x, target)
    each = target.shape if x.dim() > 1 else ()
    below = spread(level, grad, reduction, len(each), max(torch.Size(each).numel(), 1))
    below = below.expand(level.size, *each).reshape(targets.shape)
    out = aten.multi_margin_loss_backward(below, rows, targets, p, margin, weight, NONE)
    return out.view(level.size, *x.shape)


@lane_rule(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss_forward(level, x, target, reduction):
    """x [B, (N,) C], target [B, (N,) C] -> [B] or [B, N], is_target [B, (N,) C]"""
    if not x.dim():
        return lane_loop(level, aten.multilabel_margin_loss_forward.default, (x, target, reduction), {})
    rows, targets = level.expanded(x), level.expanded(target)
    if x.dim() > 1:
        rows, targets = rows.flatten(0, 1), targets.flatten(0, 1)
    losses, is_target = aten.multilabel_margin_loss_forward(rows, targets, NONE)
    losses = reduced(losses.view(level.size, *x.shape[:-1]), reduction)
    return losses, is_target.view(level.size, *target.shape)


@lane_rule(aten.multilabel_margin_loss_backward.default)
def multilabel_margin_loss_backward(level, grad, x, target, reduction, is_target):
    """grad [B] or [B, N], x [B, (N,) C] -> [B, (N,) C]"""
    if not x.dim():
        op = aten.multilabel_margin_loss_backward.default
        return lane_loop(level, op, (grad, x, target, reduction, is_target), {})
    each = x.shape[:-1]
    below = spread(level, grad, reduction, len(each), max(each.numel(), 1)).expand(level.size, *each)
    values = [level.expanded(t) for t in (x, target, is_target)]
    if each:
        below = below.flatten()
        values = [value.flatten(0, 1) for value in values]
    rows, targets, where = values
    out = aten.multilabel_margin_loss_backward(below.contiguous(), rows, targets, NONE, where)
    return out.view(level.size, *x.shape)


# --- connectionist temporal classification ---------------------------------------------------------------------------


def _ctc_operands(level, log_probs, targets, input_lengths, target_lengths):
    """log_probs [B, T, N, C] -> [T, B * N, C]; targets and lengths with the lanes in front of N"""
    probs = level.expanded(log_probs).movedim(0, 1).flatten(1, 2)
    labels = level.expanded(targets).flatten(0, 1)
    lengths = [
        level.expanded(length).flatten() if isinstance(length, Tensor) else list(length) * level.size
        for length in (input_lengths, target_lengths)
    ]
    return probs, labels, *lengths


def _ctc_forward(op):
    @lane_rule(op)
    def forward(level, log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
        """log_probs [B, T, N, C], targets [B, N, S] or [B, sum of lengths] -> loss [B, N], log_alpha [B, N, T, *]"""
        if not level.size:
            return lane_loop(level, op, (log_probs, targets, input_lengths, target_lengths, blank, zero_infinity), {})
        operands = _ctc_operands(level, log_probs, targets, input_lengths, target_lengths)
        losses, log_alpha = op(*operands, blank, zero_infinity)
        sides = (level.size, log_probs.shape[1])
        return losses.unflatten(0, sides), log_alpha.unflatten(0, sides)


def _ctc_backward(op):
    @lane_rule(op)
    def backward(level, grad, log_probs, targets, input_lengths, target_lengths, loss, log_alpha, blank, zero=False):
        """grad [B, N], log_probs [B, T, N, C] -> [B, T, N, C]"""
        operands = _ctc_operands(level, log_probs, targets, input_lengths, target_lengths)
        grads, losses = level.expanded(grad).flatten(), level.expanded(loss).flatten()
        alpha = level.expanded(log_alpha).flatten(0, 1).contiguous()
        out = op(grads, *operands, losses, alpha, blank, zero)
        return out.unflatten(1, (level.size, log_probs.shape[1])).movedim(1, 0)


_ctc_forward(aten._ctc_loss.default)
_ctc_forward(aten._ctc_loss.Tensor)
_ctc_backward(aten._ctc_loss_backward.default)
_ctc_backward(aten._ctc_loss_backward.Tensor)


@lane_rule(aten._use_cudnn_ctc_loss.default, aten._use_cudnn_ctc_loss.Tensor, raw=True)
def use_cudnn_ctc_loss(level, *args):
    """Never: its kernel wants lengths that it can read."""
    return False


# --- distances -------------------------------------------------------------------------------------------------------


def _pairs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, N, M] -> the index of both rows of each pair, and their difference [B, pairs, M]"""
    first, second = torch.triu_indices(x.shape[1], x.shape[1], 1, device=x.device).unbind(0)
    return first, second, x.index_select(1, first) - x.index_select(1, second)


@lane_rule(aten._pdist_forward.default)
def pdist_forward(level, x, p=2):
    """x [B, N, M] -> [B, N (N - 1) / 2]"""
    _, _, difference = _pairs(x.value)
    return torch.linalg.vector_norm(difference, p, 2)


@lane_rule(aten._pdist_backward.default)
def pdist_backward(level, grad, x, p, pdist):
    """grad, pdist [B, N (N - 1) / 2], x [B, N, M] -> [B, N, M]: d|x_i - x_j|_p of each pair, added to both rows"""
    rows = level.expanded(x)
    first, second, difference = _pairs(rows)
    distance = level.expanded(pdist).unsqueeze(2)
    slope = level.expanded(grad).unsqueeze(2)
    if p == 0:
        return torch.zeros_like(rows)
    if p == 1:
        each = slope * difference.sign()
    elif p == 2:
        each = torch.where(distance == 0, 0, slope * difference / distance)
    elif p == float("inf"):
        each = slope * difference.sign() * (difference.abs() == distance)
    else:
        steep = difference.sign() * difference.abs().pow(p - 1) * slope / distance.pow(p - 1)
        each = torch.where((difference == 0) | (distance == 0), 0, steep)
    return torch.zeros_like(rows).index_add(1, first, each).index_add(1, second, each, alpha=-1)


@lane_rule(aten._cdist_forward.default)
def cdist_forward(level, x, y, p, compute_mode):
    """x [B, *, P, M], y [B, *, R, M] -> [B, *, P, R]"""
    align = aligner(level, [x, y])
    return aten._cdist_forward(align(x), align(y), p, compute_mode)


@lane_rule(aten._cdist_backward.default)
def cdist_backward(level, grad, x, y, p, cdist):
    """grad, cdist [B, *, P, R], x [B, *, P, M], y [B, *, R, M] -> [B, *, P, M]"""
    align = aligner(level, [grad, x, y])

    def laid_out(tensor):
        value = align(tensor)
        value = value[(None,) * (grad.dim() + 1 - value.dim())]
        return value.expand(level.size, *value.shape[1:]).contiguous()

    return aten._cdist_backward(laid_out(grad), laid_out(x), laid_out(y), p, laid_out(cdist))


@lane_rule(aten._euclidean_dist.default)
def euclidean_dist(level, x, y):
    """x [B, *, P, M], y [B, *, R, M] -> [B, *, P, R]"""
    return aten._euclidean_dist(level.expanded(x), level.expanded(y))


decompose(aten.dist.default, lambda x, y, p=2: torch.linalg.vector_norm(x - y, p))
