"""Values and first derivatives of one op mapped over lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

import lanewise

from .oracle import (
    CALLS,
    Layout,
    Mismatch,
    NoOracle,
    Tensors,
    central_difference,
    compare,
    directions_of,
    filled,
    floats,
    in_each_call,
    lane,
    lane_grad,
    lane_jvp,
    loop_over,
    loss,
    pack,
    stack,
    unseen,
    wants_grad,
)
from .samples import MAX_LANES, LaneSample


def _vmap(f: Callable, in_dims: tuple, random: bool) -> Callable:
    """The op mapped; one that draws gets the seed of each lane of the loop, and the same numbers in all lanes."""
    return lanewise.vmap(f, in_dims=in_dims, randomness="same" if random else "error")


def _not_mapped(layout: Layout) -> tuple[int, ...]:
    return tuple(n for n, dim in enumerate(layout.in_dims) if dim is None)


def check_vmap(sample: LaneSample, layout: Layout, random: bool, values: bool) -> float:
    """vmap(f) against the loop."""
    rows: list[Tensors] = []

    def each(i: int) -> Tensors:
        rows.append(lane(sample.lanes, layout, i))
        return sample.f(*rows[-1])

    want = loop_over(each, layout)
    written = stack(rows, layout.lanes)
    if random:
        got = lanewise.vmap(sample.f, in_dims=layout.in_dims, randomness="different")(*pack(sample.lanes, layout))
        compare(got, want, "output of randomness='different'", values=False)
    mapped = _vmap(unseen(sample.f, _not_mapped(layout)), layout.in_dims, random)

    def run() -> tuple[Tensors, Tensors]:
        packed = pack(sample.lanes, layout)
        return mapped(*packed), packed

    def judge(found: tuple[Tensors, Tensors]) -> float:
        got, packed = found
        for n, (dim, argument, rows_of_it) in enumerate(zip(layout.in_dims, packed, written, strict=True)):
            if dim is not None:
                compare([argument.movedim(dim, 0)], (rows_of_it,), f"argument {n} after the call")
        return compare(got, want, "output", values)

    return in_each_call(run, judge)


def _of_pairs(sample: LaneSample, layout: Layout, random: bool, each: Callable, inside: Callable) -> tuple:
    """What a vmap inside another runs, and what it is to give: lane (i, j) holds the numbers of lane i + j."""
    inner = Layout(layout.in_dims, 2)
    if layout.lanes == 0:
        raise NoOracle("not checked")
    shifted = [[sample.lanes[(i + j) % MAX_LANES] for j in range(2)] for i in range(layout.lanes)]
    rows = [pack(values_, inner) for values_ in shifted]
    outer_dims = tuple(None if dim is None else 0 for dim in layout.in_dims)
    packed = tuple(
        rows[0][k] if dim is None else torch.stack([row[k] for row in rows]) for k, dim in enumerate(outer_dims)
    )

    if random:
        # In the memory of each lane as in the loop's: numbers are drawn in the order of the memory.
        packed = tuple(
            t if dim is None else t.movedim(dim + 1, 1).contiguous().movedim(1, dim + 1)
            for t, dim in zip(packed, layout.in_dims, strict=True)
        )

    def row(i: int) -> Tensors:
        results = []
        for j in range(2):
            args = [sample.lanes[0 if dim is None else (i + j) % MAX_LANES][k] for k, dim in enumerate(outer_dims)]
            results.append(each(tuple(t.clone() for t in args)))
        return stack(results, 2)

    mapped = _vmap(_vmap(inside, layout.in_dims, random), outer_dims, random)

    def run() -> Tensors:
        try:
            return mapped(*(t.clone() for t in packed))
        except Exception as error:
            # The loop has contiguous lanes. With lanes in the last dim, there are views that torch refuses of slices.
            slices = [t if d is None else t[0].select(d, 0) for t, d in zip(packed, layout.in_dims, strict=True)]
            try:
                each(tuple(slices))
            except Exception:
                raise NoOracle("refused of slices") from error
            raise

    return run, loop_over(row, layout)


def check_vmap_vmap(sample: LaneSample, layout: Layout, random: bool, values: bool) -> float:
    """vmap(vmap(f)): outer lanes in front of the inner ones."""
    f = unseen(sample.f, _not_mapped(layout))
    run, want = _of_pairs(sample, layout, random, lambda args: sample.f(*args), f)
    return in_each_call(run, lambda got: compare(got, want, "output", values))


def _gradient(f: Callable, diff: tuple[int, ...]) -> Callable:
    return lanewise.grad(lambda *xs: loss(f(*xs)), argnums=diff)


def _by_differences(sample: LaneSample, args: Tensors, direction: Tensors, gradients: Tensors) -> bool:
    """Whether gradients of a lane are right by differences along a direction: torch's own are wrong for a few ops."""
    along = sum((g.conj() * d).sum().real for g, d in zip(gradients, direction, strict=True))
    (want,) = central_difference(lambda *xs: (loss(sample.f(*xs)),), args, sample.diff, direction)
    return torch.allclose(want.double(), torch.as_tensor(along).double(), rtol=1e-4, atol=1e-5)


def _judge_gradients(sample: LaneSample, layout: Layout, want: Tensors) -> Callable[[Tensors], float]:
    def judge(got: Tensors) -> float:
        try:
            return compare(got, want, "gradient")
        except Mismatch:
            tangents = directions_of(sample)
            places = Layout(tuple(layout.in_dims[n] for n in sample.diff), layout.lanes)
            for i in range(layout.lanes):
                args, direction = lane(sample.lanes, layout, i), lane(tangents, places, i)
                if not _by_differences(sample, args, direction, tuple(g[i] for g in got)):
                    raise
            return 0.0

    return judge


def check_vmap_vmap_grad(sample: LaneSample, layout: Layout, random: bool, values: bool) -> float:
    """vmap(vmap(grad(loss of f))) against autograd per lane."""
    wants_grad(sample)
    inside = _gradient(unseen(sample.f), sample.diff)
    run, want = _of_pairs(sample, layout, random, lambda args: lane_grad(sample.f, args, sample.diff), inside)

    def judge(got: Tensors) -> float:
        worst = 0.0
        for i in range(layout.lanes):
            order = [(i + j) % MAX_LANES for j in range(2)]
            lanes = [lane(sample.lanes, layout, k) for k in order]
            judge_row = _judge_gradients(
                replace(sample, lanes=lanes), Layout(layout.in_dims, 2), tuple(t[i] for t in want)
            )
            worst = max(worst, judge_row(tuple(g[i] for g in got)))
        return worst

    return in_each_call(run, judge)


def check_vmap_grad(sample: LaneSample, layout: Layout, random: bool, values: bool) -> float:
    """vmap(grad(loss of f)) against autograd per lane."""
    wants_grad(sample)
    want = loop_over(lambda i: lane_grad(sample.f, lane(sample.lanes, layout, i), sample.diff), layout)
    mapped = _vmap(_gradient(unseen(sample.f), sample.diff), layout.in_dims, random)
    return in_each_call(lambda: mapped(*pack(sample.lanes, layout)), _judge_gradients(sample, layout, want))


def check_vmap_jacrev(sample: LaneSample, layout: Layout, random: bool, values: bool) -> float:
    """vmap(jacrev(loss of f, and -2 times it)): two rows, against autograd per lane."""
    wants_grad(sample)
    want = loop_over(lambda i: lane_grad(sample.f, lane(sample.lanes, layout, i), sample.diff), layout)
    judge_row = _judge_gradients(sample, layout, want)
    f = unseen(sample.f)

    def both(*xs: torch.Tensor) -> torch.Tensor:
        value = loss(f(*xs))
        return torch.stack([value, -2 * value])

    def judge(got: Tensors) -> float:
        first = tuple(rows[:, 0] for rows in got)
        compare([rows[:, 1] for rows in got], tuple(-2 * row for row in first), "second row")
        return judge_row(first)

    mapped = _vmap(lanewise.jacrev(both, argnums=sample.diff), layout.in_dims, random)
    return in_each_call(lambda: mapped(*pack(sample.lanes, layout)), judge)


def _grad_of_sum(sample: LaneSample, layout: Layout) -> Tensors:
    """Autograd per lane, laid out like the arguments: summed over the lanes of what is not mapped."""
    per_lane = loop_over(lambda i: lane_grad(sample.f, lane(sample.lanes, layout, i), sample.diff), layout)
    found = []
    for n, gradient in zip(sample.diff, per_lane, strict=True):
        dim = layout.in_dims[n]
        found.append(gradient.sum(0) if dim is None else gradient.movedim(0, dim))
    return tuple(found)


def _compare_gradients(got, want: Tensors, sample: LaneSample, layout: Layout) -> float:
    """As `compare`; where the loop's gradient differs, differences along a direction say which of the two is right.

    torch's formula is wrong for a few ops (as_strided_scatter of one element, batch_norm of a weight with strides).
    """
    try:
        return compare(got, want, "gradient")
    except Mismatch:
        args = pack(sample.lanes, layout)
        mapped = Layout(tuple(layout.in_dims[n] for n in sample.diff), layout.lanes)
        direction = pack(directions_of(sample), mapped)
        total = central_difference(lambda *xs: (_loss_of_lanes(sample, layout, xs),), args, sample.diff, direction)[0]
        along = sum((g.conj() * d).sum().real for g, d in zip(got, direction, strict=True))
        if not torch.isclose(total.double(), along.double(), rtol=1e-4, atol=1e-5):
            raise
        return 0.0


def _loss_of_lanes(sample: LaneSample, layout: Layout, args: Tensors) -> torch.Tensor:
    rows = range(layout.lanes)
    # Clones, since as_strided would look into the neighbours.
    lanes = [[t if d is None else t.select(d, i).clone() for t, d in zip(args, layout.in_dims)] for i in rows]
    return sum((loss(sample.f(*row)) for row in lanes), torch.zeros((), dtype=torch.float64))


def check_grad_vmap(sample: LaneSample, layout: Layout, random: bool, values: bool) -> float:
    """grad(loss of vmap(f)) against autograd per lane."""
    wants_grad(sample)
    want = _grad_of_sum(sample, layout)
    mapped = _vmap(unseen(sample.f), layout.in_dims, random)
    transform = lanewise.grad(lambda *xs: loss(mapped(*xs), lead=1), argnums=sample.diff)
    return in_each_call(
        lambda: transform(*pack(sample.lanes, layout)), lambda got: _compare_gradients(got, want, sample, layout)
    )


def check_backward_vmap(sample: LaneSample, layout: Layout, random: bool, values: bool) -> float:
    """Plain torch.autograd around vmap(f)."""
    wants_grad(sample)
    want = _grad_of_sum(sample, layout)
    mapped = _vmap(unseen(sample.f), layout.in_dims, random)
    of_one = [t.clone().requires_grad_(n in sample.diff) for n, t in enumerate(sample.lanes[0])]
    recorded = [t.requires_grad for t in sample.f(*of_one)]

    def run() -> Tensors:
        packed = tuple(
            t.detach().requires_grad_() if n in sample.diff else t for n, t in enumerate(pack(sample.lanes, layout))
        )
        out = mapped(*packed)
        if layout.lanes and [t.requires_grad for t in out] != recorded:
            raise Mismatch(f"outputs that require grad: {[t.requires_grad for t in out]} instead of {recorded}")
        value = loss(out, lead=1)
        leaves = [packed[n] for n in sample.diff]
        if not value.requires_grad:
            raise NoOracle("no lanes")
        return torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)

    return in_each_call(run, lambda got: _compare_gradients(got, want, sample, layout))


def _check_forward(
    sample: LaneSample, layout: Layout, run: Callable[[Tensors, Tensors], Tensors], calls: int = CALLS
) -> float:
    tangents = directions_of(sample)
    mapped = Layout(tuple(layout.in_dims[n] for n in sample.diff), layout.lanes)

    def each(oracle):
        return lambda i: oracle(sample.f, lane(sample.lanes, layout, i), sample.diff, lane(tangents, mapped, i))

    want = loop_over(each(lane_jvp), layout)

    def judge(got: Tensors) -> float:
        try:
            return compare(got, want, "tangent")
        except Mismatch as mismatch:
            # torch's own double backward is wrong for a few ops; differences decide then, as far as they can.
            second = loop_over(each(central_difference), layout)
            if all(
                torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True) for a, b in zip(got, second, strict=True)
            ):
                return mismatch.size
            raise

    return in_each_call(lambda: run(pack(sample.lanes, layout), pack(tangents, mapped)), judge, calls)


def _jvp(f: Callable, diff: tuple[int, ...], args: Tensors, tangents: Tensors) -> Tensors:
    def g(*new):
        return floats(f(*filled(args, diff, new)))

    return lanewise.jvp(g, tuple(args[n] for n in diff), tangents)[1]


def check_jvp(sample: LaneSample, layout: Layout, random: bool, values: bool) -> float:
    """jvp(f) of a single example (in_dims play no part)."""
    wants_grad(sample)
    if layout.lanes != 1:
        raise NoOracle("one example")
    unmapped = Layout(tuple(None for _ in layout.in_dims), 1)

    def run(args: Tensors, tangents: Tensors) -> Tensors:
        return tuple(t.unsqueeze(0) for t in _jvp(sample.f, sample.diff, args, tangents))

    return _check_forward(sample, unmapped, run, calls=1)


def check_vmap_jvp(sample: LaneSample, layout: Layout, random: bool, values: bool) -> float:
    """vmap(jvp(f)) against tangents per lane."""
    wants_grad(sample)
    of_tangents = tuple(layout.in_dims[n] for n in sample.diff)
    if all(dim is None for dim in layout.in_dims):
        raise NoOracle("nothing mapped")
    count = len(layout.in_dims)
    f = unseen(sample.f)

    def one(*both: torch.Tensor) -> Tensors:
        return _jvp(f, sample.diff, both[:count], both[count:])

    mapped = _vmap(one, (*layout.in_dims, *of_tangents), random)
    return _check_forward(sample, layout, lambda args, tangents: mapped(*args, *tangents))


def check_jvp_vmap(sample: LaneSample, layout: Layout, random: bool, values: bool) -> float:
    """jvp(vmap(f)) against tangents per lane."""
    wants_grad(sample)
    mapped = _vmap(unseen(sample.f), layout.in_dims, random)
    return _check_forward(sample, layout, lambda args, tangents: _jvp(mapped, sample.diff, args, tangents))


COMPOSITIONS: dict[str, Callable[[LaneSample, Layout, bool, bool], float]] = {
    "vmap": check_vmap,
    "vmap_grad": check_vmap_grad,
    "grad_vmap": check_grad_vmap,
    "vmap_vmap": check_vmap_vmap,
    "vmap_vmap_grad": check_vmap_vmap_grad,
    "vmap_jacrev": check_vmap_jacrev,
    "vmap_inplace": check_vmap,
    "backward_vmap": check_backward_vmap,
    "jvp": check_jvp,
    "vmap_jvp": check_vmap_jvp,
    "jvp_vmap": check_jvp_vmap,
}
