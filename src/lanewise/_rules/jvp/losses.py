"""Forward rules of losses and distances."""

import torch

from lanewise._core.dual import NAMED_COMPOSITIONS
from lanewise._rules.jvp.arithmetic import log_of_sum
from lanewise._rules.jvp.families import decompose, decomposed, is_constant, jvp_rule, linear, rule_on_plane
from lanewise._rules.jvp.reductions import over
from lanewise.errors import TransformError, at_user_line

aten = torch.ops.aten


def _reduced(loss, reduction):
    return loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss


@jvp_rule(aten.mse_loss.default, guarded=False)
def mse_loss(level, x, y, reduction=1):
    """2 (x - y) (t_x - t_y)"""
    px, py = level.primal(x), level.primal(y)
    tx, ty = level.tangent(x), level.tangent(y)
    t = -ty if tx is None else tx if ty is None else tx - ty
    return aten.mse_loss.default(px, py, reduction), _reduced(2 * (px - py) * t, reduction)


def _nll(op):
    def rule(level, x, target, weight, reduction, ignore_index):
        target, weight = level.primal(target), level.primal(weight)
        out = op(level.primal(x), target, weight, reduction, ignore_index)
        t = level.tangent(x)
        # The gradient's kernel takes contiguous tensors only.
        return out, None if t is None else [op(t.contiguous(), target, weight, reduction, ignore_index)[0], None]

    jvp_rule(op)(rule)


_nll(aten.nll_loss_forward.default)
_nll(aten.nll_loss2d_forward.default)


@jvp_rule(aten.binary_cross_entropy.default)
def binary_cross_entropy(level, x, y, weight=None, reduction=1):
    """(x - y) / (x (1 - x)) t_x + (log(1 - x) - log(x)) t_y, kept finite as torch does"""
    px, py, pw = level.primal(x), level.primal(y), level.primal(weight)
    tx, ty, tw = level.tangent(x), level.tangent(y), level.tangent(weight)
    total = None
    if tx is not None:
        total = tx * (px - py) / (px * (1 - px)).clamp_min(1e-12)
    if ty is not None:
        part = ty * ((-px).log1p().clamp_min(-100) - px.log().clamp_min(-100))
        total = part if total is None else total + part
    if pw is not None and total is not None:
        total = total * pw
    if tw is not None:
        part = tw * aten.binary_cross_entropy.default(px, py, None, 0)
        total = part if total is None else total + part
    return aten.binary_cross_entropy.default(px, py, pw, reduction), _reduced(total, reduction)


@decomposed(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(x, y, weight=None, pos_weight=None, reduction=1):
    """(1 - y) x - (1 + (pos_weight - 1) y) log sigmoid(x)"""
    factor = 1 if pos_weight is None else 1 + (pos_weight - 1) * y
    loss = (1 - y) * x - factor * torch.nn.functional.logsigmoid(x)
    return _reduced(loss if weight is None else loss * weight, reduction)


@jvp_rule(aten.log_sigmoid_forward.default)
def log_sigmoid(level, x):
    """t sigmoid(-x)"""
    out = aten.log_sigmoid_forward.default(x.value)
    return out, [x.tangent * (-x.value).sigmoid(), None]


@rule_on_plane(aten._ctc_loss.default, aten._ctc_loss.Tensor)
def ctc_loss(level, x, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    """x [T, N, C] -> the gradient of each example's loss times t; torch's gradient has no derivative of its own"""
    if level.tangent(x) is not None and not is_constant(level.primal(x)):
        return ctc_written_out(x, targets, input_lengths, target_lengths, blank, zero_infinity)
    given = (targets, input_lengths, target_lengths)
    return level.pair(*level.below(_ctc_tangent, level, x, *given, blank, zero_infinity))


def _ctc_tangent(level, x, targets, input_lengths, target_lengths, blank, zero_infinity):
    px, t, targets = level.primal(x), level.tangent(x), level.primal(targets)
    lengths = (level.primal(input_lengths), level.primal(target_lengths))
    kind = "Tensor" if isinstance(input_lengths, torch.Tensor) else "default"
    out = getattr(aten._ctc_loss, kind)(px, targets, *lengths, blank, zero_infinity)
    if t is None:
        return out, [None, None]
    backward = getattr(aten._ctc_loss_backward, kind)
    slope = backward(torch.ones_like(out[0]), px, targets, *lengths, out[0], out[1], blank, zero_infinity)
    # torch's gradient holds for normalised log-probabilities only: it has exp(x) added at the steps that count.
    steps = torch.arange(px.shape[0], device=px.device).unsqueeze(1)
    unused = steps >= torch.as_tensor(lengths[0], device=px.device).reshape(1, -1)
    if zero_infinity:
        unused = unused | (out[0] == torch.inf).reshape(1, -1)
    slope = slope - px.exp().masked_fill(unused.unsqueeze(2) if px.dim() == 3 else unused, 0)
    return out, [(slope * t).sum((0, 2)) if px.dim() == 3 else (slope * t).sum(), None]


# Less than any sum of logarithms, and finite, so that derivatives of sums with it are.
_NEVER = -1e30


def ctc_written_out(x, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    """x [T, N, C], targets [N, S] or all in a row -> losses [N] by simple operations

    The second result is of the shape of the sums that the kernel keeps.
    """
    single = x.dim() == 2
    if single:
        x, targets = x.unsqueeze(1), targets.reshape(1, -1)
    steps = torch.as_tensor(input_lengths, device=x.device).reshape(-1)
    counts = torch.as_tensor(target_lengths, device=x.device).reshape(-1)
    if targets.dim() == 1:
        longest = targets.shape[0] if isinstance(target_lengths, torch.Tensor) else max(target_lengths, default=0)
        places = (counts.cumsum(0) - counts).unsqueeze(1) + torch.arange(longest, device=x.device)
        targets = targets[places.clamp_max(max(targets.shape[0] - 1, 0))]
    # Blanks around each target; what lies behind the last is never read.
    at = torch.arange(2 * targets.shape[1] + 1, device=x.device)
    labels = torch.where(at % 2 == 1, torch.nn.functional.pad(targets, (0, 1))[:, at // 2], blank)
    labels = labels.masked_fill(at > 2 * counts.unsqueeze(1), blank)
    # Two places on, over a blank, if that leads from one label to another.
    skips = (labels != blank) & (labels != torch.nn.functional.pad(labels, (2, 0), value=blank)[:, :-2])
    never = x.new_full((x.shape[1], 1), _NEVER)
    scores = x.gather(2, labels.expand(x.shape[0], *labels.shape)).clamp_min(_NEVER)
    reached = scores[0].masked_fill(at > 1, _NEVER)
    for step in range(1, x.shape[0]):
        before = torch.cat([never, never, reached], 1)
        nearer = log_of_sum(reached, before[:, 1:-1])
        further = log_of_sum(nearer, before[:, :-2].masked_fill(~skips, _NEVER)) + scores[step]
        reached = torch.where(step < steps.unsqueeze(1), further, reached)
    padded = torch.cat([never, reached], 1)
    ends = padded.gather(1, torch.stack([2 * counts, 2 * counts + 1], 1))
    loss = -log_of_sum(ends[:, 0], ends[:, 1])
    loss = torch.where(steps == 0, torch.where(counts == 0, 0, -2 * _NEVER), loss)
    loss = loss.masked_fill(loss > -_NEVER / 2, 0 if zero_infinity else torch.inf)
    return loss.squeeze(0) if single else loss, x.new_zeros(x.shape[1], x.shape[0], at.shape[0])


# --- margin losses: torch cannot differentiate their backward formulas ------------------------------------------------


def _gaps(x, target, margin):
    """max(0, margin - x[target] + x[i]) for the classes i, and where i is another class than the target; [N, C]"""
    x, target = (x if x.dim() == 2 else x.reshape(1, -1)), target.reshape(-1, 1)
    others = torch.arange(x.shape[1], device=x.device) != target
    return (margin - x.gather(1, target) + x).relu(), others, target


@decomposed(aten.multi_margin_loss.default)
def multi_margin_loss(x, target, p=1, margin=1, weight=None, reduction=1):
    """sum over i != target of w[target] max(0, margin - x[target] + x[i])^p / C"""
    gaps, others, rows = _gaps(x, target, margin)
    loss = gaps if p == 1 else gaps * gaps
    if weight is not None:
        loss = loss * weight[rows]
    loss = loss.masked_fill(~others, 0).mean(1)
    return _reduced(loss if target.dim() or reduction else loss.reshape(()), reduction)


@decomposed(aten.multi_margin_loss_backward.default)
def multi_margin_loss_backward(g, x, target, p, margin, weight=None, reduction=1):
    """The gradient of that loss"""
    gaps, others, rows = _gaps(x, target, margin)
    slope = (gaps > 0).to(x.dtype) if p == 1 else 2 * gaps
    if weight is not None:
        slope = slope * weight[rows]
    slope = slope.masked_fill(~others, 0) / gaps.shape[1]
    scale = 1 / gaps.shape[0] if reduction == 1 else 1
    slope = (slope - torch.zeros_like(slope).scatter_add(1, rows, slope.sum(1, True))) * scale
    return (slope * (g.reshape(-1, 1) if reduction == 0 else g)).reshape(x.shape)


linear(aten.multilabel_margin_loss_backward.default)


@jvp_rule(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss(level, x, target, reduction):
    """x, target [N, C]: sum over targets j and other classes i of max(0, 1 - x[j] + x[i]) / C"""
    px, t, labels = level.primal(x), level.tangent(x), level.primal(target)
    out = aten.multilabel_margin_loss_forward.default(px, labels, reduction)
    gaps, steps, counted = _gaps_to_labels(px, t, labels, out[1])
    return out, [_sum_of_gaps(steps.masked_fill(~(counted & (gaps > 0)), 0), reduction).reshape(out[0].shape), None]


def whole_multilabel_margin_loss(x, target, reduction):
    """That loss, and the classes that are targets"""
    with torch.no_grad():
        out = aten.multilabel_margin_loss_forward.default(x, target, reduction)
    gaps, _, counted = _gaps_to_labels(x, x, target, out[1])
    return _sum_of_gaps(gaps.relu().masked_fill(~counted, 0), reduction).reshape(out[0].shape), out[1]


def _gaps_to_labels(x, t, labels, is_target):
    """1 - x[j] + x[i] for targets j and classes i [N, C, C], its tangent, and where it counts"""
    rows, steps = (v if v.dim() == 2 else v.reshape(1, -1) for v in (x, t))
    labels = labels.reshape(rows.shape)
    # The targets are those before the first -1.
    valid = (labels < 0).cumsum(1) == 0
    labels = labels.clamp_min(0)
    gaps, slopes = (v.unsqueeze(1) - v.gather(1, labels).unsqueeze(2) for v in (rows, steps))
    return 1 + gaps, slopes, valid.unsqueeze(2) & (is_target.reshape(rows.shape) == 0).unsqueeze(1)


def _sum_of_gaps(gaps, reduction):
    return _reduced(gaps.sum((1, 2)) / gaps.shape[2], reduction)


# --- distances: the norm of differences, whose tangent is 0 where they are 0 ------------------------------------------


@decomposed(aten._cdist_forward.default)
def cdist(a, b, p, mode=None):
    """a [*B, M, D], b [*B, N, D] -> [*B, M, N]"""
    return torch.linalg.vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, -1)


@jvp_rule(aten._euclidean_dist.default)
def euclidean_dist(level, a, b):
    """a [*B, M, D], b [*B, N, D] -> [*B, M, N]: (a - b) (t_a - t_b) / y, by products of matrices; 0 where y is"""
    pa, pb, ta, tb = level.primal(a), level.primal(b), level.tangent(a), level.tangent(b)
    y = aten._euclidean_dist.default(pa, pb)
    total = None
    if ta is not None:
        total = (pa * ta).sum(-1, keepdim=True) - ta @ pb.mT
    if tb is not None:
        part = (pb * tb).sum(-1, keepdim=True).mT - pa @ tb.mT
        total = part if total is None else total + part
    return y, over(total, y)


decompose(aten.dist.default, lambda a, b, p=2: torch.linalg.vector_norm(a - b, p))


def _norm_slope(difference, distance, p):
    """The gradient of the p-norm along the last dim, 0 at 0."""
    distance = distance.unsqueeze(-1)
    if p == 0:
        return torch.zeros_like(difference)
    if p == 1:
        return difference.sign()
    if p == torch.inf:
        largest = difference.abs() == distance
        return difference.sign() * largest / largest.sum(-1, keepdim=True)
    same = distance == 0
    distance = distance.masked_fill(same, 1)
    if p == 2:
        return (difference / distance).masked_fill(same, 0)
    flat = same | (difference == 0)
    return (difference.sign() * (difference.abs() / distance).masked_fill(flat, 1) ** (p - 1)).masked_fill(flat, 0)


@decomposed(aten._cdist_backward.default)
def cdist_backward(g, a, b, p, distance):
    """The gradient of a"""
    return (g.unsqueeze(-1) * _norm_slope(a.unsqueeze(-2) - b.unsqueeze(-3), distance, p)).sum(-2)


def _pairs(x):
    return torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device).unbind(0)


@decomposed(aten._pdist_forward.default)
def pdist(x, p=2):
    """x [N, D] -> [N (N - 1) / 2]"""
    first, second = _pairs(x)
    return torch.linalg.vector_norm(x[first] - x[second], p, -1)


@decomposed(aten._pdist_backward.default)
def pdist_backward(g, x, p, distance):
    """The gradient of x"""
    first, second = _pairs(x)
    slope = g.unsqueeze(-1) * _norm_slope(x[first] - x[second], distance, p)
    return torch.zeros_like(x).index_add(0, first, slope).index_add(0, second, -slope)


# --- cross entropy in chunks: its gradient is precomputed where `requires_grad` says so, which tangents do not --------


def _chunked_cross_entropy(x, w, target, *given):
    if any(given[-3:]):
        raise TransformError(
            at_user_line(
                "linear_cross_entropy in chunks has a first derivative only: it computes its gradient ahead",
                "F.linear_cross_entropy(..., options=None)",
            )
        )
    return whole_cross_entropy(x, w, target, *given)


def whole_cross_entropy(x, w, target, bias, weight, reduction, ignore_index, smoothing, *options):
    """The loss without chunks, and no gradients computed ahead"""
    loss = torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(x, w, bias), target, weight, None, ignore_index, None, reduction, smoothing
    )
    return loss, *[x.new_zeros(0) for _ in range(3)]


def whole_cross_entropy_of_each(x, w, target, bias, weight, ignore_index, *options):
    """The losses of the examples without chunks"""
    logits = torch.nn.functional.linear(x, w, bias)
    return torch.nn.functional.cross_entropy(logits, target, weight, None, ignore_index, None, "none")


NAMED_COMPOSITIONS["torch_nn::_linear_cross_entropy_batch_chunked"] = _chunked_cross_entropy
NAMED_COMPOSITIONS["torch_nn::_linear_cross_entropy_batch_chunked_no_reduction"] = whole_cross_entropy_of_each
