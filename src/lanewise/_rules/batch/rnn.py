"""Recurrent layers and cells. torch runs float32 LSTMs on the CPU through one fused layer; the rest decomposes."""

from contextlib import nullcontext

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.level import on_plane
from lanewise._core.parting.joins import part_by
from lanewise._core.parting.unasked import note_question
from lanewise._rules.batch.datadependent import differing_shapes
from lanewise._rules.batch.families import decompose, lane_rule
from lanewise._rules.batch.tracking import is_tracked

aten = torch.ops.aten
LSTM = 2  # torch's number for the mode of the fused layer
LARGE = 256  # elements of a lane's state from which the fused layer for each lane beats plain operations for all


def _steps(x, weights, h, c, reverse):
    """An LSTM layer, lane by lane in every operand.

    x [B, T, N, I], weights `[B, 4H, I], [B, 4H, H]` and maybe two biases [B, 4H], h and c [B, N, H] -> for each time in
    the order of computing: the activated gates i, f, g, o, then c before, h before, tanh of c, c and h, all [B, N, H]
    """
    w_input, w_hidden, *biases = weights
    lanes, times, images = x.shape[:3]
    drive = torch.bmm(x.reshape(lanes, times * images, x.shape[3]), w_input.mT).unflatten(1, (times, images))
    if biases:
        drive = drive + (biases[0] + biases[1])[:, None, None]
    steps = {}
    for t in reversed(range(times)) if reverse else range(times):
        i, f, g, o = (drive[:, t] + torch.bmm(h, w_hidden.mT)).chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c_next = f * c + i * g
        squashed = c_next.tanh()
        h_next = o * squashed
        steps[t] = (i, f, g, o, c, h, squashed, c_next, h_next)
        c, h = c_next, h_next
    return steps


def _layer_operands(level: BatchLevel, x, weights, h, c, has_biases):
    """x [B, T, N, I], the weights that are there, h and c [B, N, H]"""
    state = [level.expanded(t).reshape(level.size, *t.shape[-2:]) for t in (h, c)]
    return level.expanded(x), [level.expanded(w) for w in weights[: 4 if has_biases else 2]], *state


@lane_rule(aten.mkldnn_rnn_layer.default)
def fused_layer(
    level,
    x,
    w_input,
    w_hidden,
    b_input,
    b_hidden,
    h,
    c,
    reverse,
    batch_sizes,
    mode,
    hidden_size,
    num_layers,
    has_biases,
    bidirectional,
    batch_first,
    train,
):
    """x [B, T, N, I], weights [B, 4H, I or H], h and c [B, N, H] -> out [B, T, N, H], h, c, and an empty workspace

    Lanes of the input are folded into N. The workspace would mix the lanes, so the backward rule does without.
    """
    assert mode == LSTM
    lanes, images = level.size, x.shape[1]
    weights = (w_input, w_hidden, b_input, b_hidden)
    workspace = level.physical(x).new_empty(lanes, 0, dtype=torch.uint8)
    if any(level.mapped(w) for w in weights) or lanes == 0:
        operands = (x, *weights, h, c)
        if images * hidden_size >= LARGE and lanes and not is_tracked(*(level.physical(t) for t in operands)):
            options = (reverse, batch_sizes, mode, hidden_size, num_layers, has_biases, bidirectional, batch_first)
            each = zip(*(level.expanded(t) for t in operands), strict=True)
            rows = [aten.mkldnn_rnn_layer(*(t.contiguous() for t in lane), *options, train)[:3] for lane in each]
            out, h_last, c_last = (torch.stack(parts) for parts in zip(*rows, strict=True))
            return out, h_last, c_last, workspace
        inputs, own_weights, h_first, c_first = _layer_operands(level, x, weights, h, c, has_biases)
        steps = _steps(inputs, own_weights, h_first, c_first, reverse)
        *_, c_last, h_last = next(reversed(steps.values()))
        out = torch.stack([steps[t][-1] for t in sorted(steps)], 1)
        return out, h_last.reshape(lanes, *h.shape), c_last.reshape(lanes, *c.shape), workspace
    # The layer reads its operands as if they were contiguous; with one image, folding alone gives a strided view.
    state = [level.expanded(t).movedim(0, -3).flatten(-3, -2).contiguous() for t in (h, c)]
    out, h_last, c_last, _ = aten.mkldnn_rnn_layer(
        level.expanded(x).transpose(0, 1).flatten(1, 2).contiguous(),
        *weights,
        *state,
        reverse,
        batch_sizes,
        mode,
        hidden_size,
        num_layers,
        has_biases,
        bidirectional,
        batch_first,
        train,
    )
    out = out.unflatten(1, (lanes, images)).transpose(0, 1)
    h_last, c_last = (t.unflatten(-2, (lanes, images)).movedim(-3, 0) for t in (h_last, c_last))
    return out, h_last, c_last, workspace


@lane_rule(aten.mkldnn_rnn_layer_backward.default)
def fused_layer_backward(
    level,
    x,
    w_input,
    w_hidden,
    b_input,
    b_hidden,
    h,
    c,
    out,
    h_last,
    c_last,
    grad_out,
    grad_h,
    grad_c,
    reverse,
    mode,
    hidden_size,
    num_layers,
    has_biases,
    *_,
):
    """grad_out [B, T, N, H], grad_h and grad_c [B, N, H] -> gradients in x, the four weights, h and c

    Backpropagation through time, with the gates computed anew; a differentiable formula.
    """
    weights = (w_input, w_hidden, b_input, b_hidden)
    inputs, own_weights, h_first, c_first = _layer_operands(level, x, weights, h, c, has_biases)
    steps = _steps(inputs, own_weights, h_first, c_first, reverse)
    lanes, times, images = inputs.shape[:3]
    slopes = None if grad_out is None else level.expanded(grad_out)
    dh = torch.zeros_like(h_first) if grad_h is None else level.expanded(grad_h).reshape(h_first.shape)
    dc = torch.zeros_like(c_first) if grad_c is None else level.expanded(grad_c).reshape(c_first.shape)
    by_time = {}
    for t in reversed(steps):
        i, f, g, o, c_before, _, squashed, _, _ = steps[t]
        dh = dh if slopes is None else dh + slopes[:, t]
        dc = dc + dh * o * (1 - squashed * squashed)
        by_time[t] = torch.cat(
            [dc * g * i * (1 - i), dc * c_before * f * (1 - f), dc * i * (1 - g * g), dh * squashed * o * (1 - o)], -1
        )
        dh = torch.bmm(by_time[t], own_weights[1])
        dc = dc * f
    drive = torch.stack([by_time[t] for t in range(times)], 1).reshape(lanes, times * images, 4 * hidden_size)
    before = torch.stack([steps[t][5] for t in range(times)], 1).reshape(lanes, times * images, hidden_size)
    grad_x = torch.bmm(drive, own_weights[0]).reshape(inputs.shape)
    grad_input = torch.bmm(drive.mT, inputs.reshape(lanes, times * images, -1))
    grad_hidden = torch.bmm(drive.mT, before)
    grad_bias = drive.sum(1)
    shape = (lanes, *h.shape)
    return grad_x, grad_input, grad_hidden, grad_bias, grad_bias.clone(), dh.reshape(shape), dc.reshape(shape)


# --- packed sequences ------------------------------------------------------------------------------------------------


def _packed_places(level: BatchLevel, times: int, rows: int, lengths, batch_first: bool):
    """Where the rows of a packed sequence lie among `times * rows` padded ones, and how many rows each time has."""
    with on_plane(None):
        places = torch.arange(times * rows)
        places = places.view(rows, times) if batch_first else places.view(times, rows)
    lengths = _agreed_lengths(level, lengths) if level.mapped(lengths) else level.physical(lengths)
    with on_plane(None) if type(lengths) is Tensor else nullcontext():
        # Kernels read how many rows there are: no plane is to have them.
        return aten._pack_padded_sequence(places, lengths, batch_first)


def _agreed_lengths(level: BatchLevel, lengths: BatchTensor) -> Tensor:
    """lengths [B, N] -> [N], the same in all lanes"""
    note_question(level)
    first = lengths.value.select(0, 0)
    if not torch.equal(lengths.value, first.expand(lengths.value.shape)):
        part_by(level, lengths.value)
        raise differing_shapes(
            "torch.nn.utils.rnn.pack_padded_sequence",
            "the lengths of the sequences differ",
            "out, _ = lstm(padded)                        # all the steps, then those that count\n"
            "last = out[torch.arange(n), lengths - 1]",
        )
    return first


@lane_rule(aten._pack_padded_sequence.default, raw=True)
def pack_padded_sequence(level, x, lengths, batch_first):
    """x [B, T, N, *S] (or [B, N, T, *S]), lengths [B, N] -> [B, rows, *S], and how many rows each time has"""
    first, second = x.shape[:2]
    times, rows = (second, first) if batch_first else (first, second)
    places, sizes = _packed_places(level, times, rows, lengths, batch_first)
    places = places.to(x.device)
    if level.mapped(x):
        return level.wrap(x.value.flatten(1, 2).index_select(1, places)), sizes
    return level.adopt(level.physical(x).flatten(0, 1).index_select(0, places)), sizes


@lane_rule(aten._pack_padded_sequence_backward.default)
def pack_padded_sequence_backward(level, grad, input_size, batch_sizes, batch_first):
    """grad [B, rows, *S], batch_sizes [T] -> [B, *input_size], zeros where nothing was packed"""
    first, second, *extent = input_size
    times, rows = (second, first) if batch_first else (first, second)
    lengths = (batch_sizes[:, None] > torch.arange(rows)).sum(0)
    places, _ = _packed_places(level, times, rows, lengths, batch_first)
    blank = grad.value.new_zeros((level.size, times * rows, *extent))
    return blank.index_copy(1, places.to(grad.device), grad.value).unflatten(1, (first, second))


# --- fused cells (torch has kernels for them on CUDA only) -----------------------------------------------------------


def _gates(gates: Tensor, more: Tensor, *biases: Tensor | None) -> Tensor:
    """The sum of what is there."""
    total = gates + more
    for bias in biases:
        total = total if bias is None else total + bias
    return total


def _lstm_cell(input_gates, hidden_gates, c, input_bias=None, hidden_bias=None):
    """gates [N, 4H], c [N, H] -> h, c and the activated gates [N, 4H]"""
    i, f, g, o = _gates(input_gates, hidden_gates, input_bias, hidden_bias).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c_next = f * c + i * g
    return o * c_next.tanh(), c_next, torch.cat([i, f, g, o], -1)


def _lstm_cell_backward(grad_h, grad_c, c, c_next, workspace, has_bias):
    """-> gradients in the gates [N, 4H], in c [N, H] and in a bias [4H]"""
    i, f, g, o = workspace.chunk(4, -1)
    squashed = c_next.tanh()
    dh = torch.zeros_like(c) if grad_h is None else grad_h
    dc = dh * o * (1 - squashed * squashed)
    dc = dc if grad_c is None else dc + grad_c
    drive = torch.cat(
        [dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * squashed * o * (1 - o)], -1
    )
    return drive, dc * f, drive.sum(0) if has_bias else None


def _gru_cell(input_gates, hidden_gates, h, input_bias=None, hidden_bias=None):
    """gates [N, 3H], h [N, H] -> h and the workspace [N, 5H]: r, z, n, h before, the hidden part of n"""
    input_gates = input_gates if input_bias is None else input_gates + input_bias
    hidden_gates = hidden_gates if hidden_bias is None else hidden_gates + hidden_bias
    (ir, iz, i_n), (hr, hz, hn) = input_gates.chunk(3, -1), hidden_gates.chunk(3, -1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (i_n + r * hn).tanh()
    return n + z * (h - n), torch.cat([r, z, n, h, hn], -1)


def _gru_cell_backward(grad, workspace, has_bias):
    """-> gradients in the input gates [N, 3H], the hidden gates [N, 3H], h [N, H] and the two biases [3H]"""
    r, z, n, h, hn = workspace.chunk(5, -1)
    dn = grad * (1 - z) * (1 - n * n)
    dz = grad * (h - n) * z * (1 - z)
    dr = dn * hn * r * (1 - r)
    inputs, hidden = torch.cat([dr, dz, dn], -1), torch.cat([dr, dz, dn * r], -1)
    biases = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return inputs, hidden, grad * z, *biases


decompose(aten._thnn_fused_lstm_cell.default, _lstm_cell)
decompose(aten._thnn_fused_lstm_cell_backward_impl.default, _lstm_cell_backward)
decompose(aten._thnn_fused_gru_cell.default, _gru_cell)
decompose(aten._thnn_fused_gru_cell_backward.default, _gru_cell_backward)
