"""Second derivatives of one op along two directions, against differences of plain autograd's gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

import lanewise

from .oracle import (
    CALLS,
    STEP,
    Layout,
    Mismatch,
    NoOracle,
    Tensors,
    check_plain,
    directions_of,
    filled,
    in_each_call,
    lane,
    lane_grad,
    loop_over,
    loss,
    pack,
    unseen,
    wants_grad,
)
from .samples import LaneSample

# Differences and derivatives are the same thing for these as functions of what they read of an argument: one triangle.
# torch spreads a gradient over both triangles or leaves it where it is, whatever is read.
_READS: dict[str, Callable[[LaneSample, Tensors], Tensors]] = {
    "cholesky": lambda sample, args: _symmetric(args),
    "cholesky_inverse": lambda sample, args: (_triangle(sample, args[0]),),
    "cholesky_solve": lambda sample, args: (args[0], _triangle(sample, args[1])),
    "linalg.cholesky": lambda sample, args: _symmetric(args),
    "linalg.cholesky_ex": lambda sample, args: _symmetric(args),
    "linalg.eigh": lambda sample, args: _symmetric(args),
    "linalg.eigvalsh": lambda sample, args: _symmetric(args),
    "linalg.pinv.hermitian": lambda sample, args: _symmetric(args),
    # torch's gradient is that of normalised log-probabilities, whatever they are.
    "nn.functional.ctc_loss": lambda sample, args: (args[0].log_softmax(2), *args[1:]),
}
# Positions of labels: the gradient is 0, and a step leads to other labels.
_LABELS = {"nn.functional.cosine_embedding_loss": 2, "nn.functional.hinge_embedding_loss": 1}
_WITHOUT = {
    "linalg.norm.subgradients_at_zero": "no derivative there",
    "to_sparse": "sums of no terms",
}


def _symmetric(args: Tensors) -> Tensors:
    return ((args[0] + args[0].mH) / 2, *args[1:])


def _triangle(sample: LaneSample, factor: torch.Tensor) -> torch.Tensor:
    return factor.triu() if "upper=True" in sample.text else factor.tril()


def _with_derivatives(sample: LaneSample) -> LaneSample:
    """The sample as a function that has derivatives, of all that it gives that torch calls differentiable."""
    if sample.name in _WITHOUT:
        raise NoOracle(_WITHOUT[sample.name])
    read = _READS.get(sample.name, lambda sample, args: args)
    labels = _LABELS.get(sample.name)
    diff = tuple(n for n in sample.diff if n != labels)
    args = tuple(t.clone().requires_grad_(n in diff) for n, t in enumerate(sample.lanes[0]))
    try:
        kept = [t.requires_grad for t in sample.f(*args)]
    except Exception as error:
        raise NoOracle(f"{type(error).__name__}: {error}") from error

    def f(*args: torch.Tensor) -> Tensors:
        return tuple(t for t, keep in zip(sample.f(*read(sample, args)), kept, strict=True) if keep)

    return replace(sample, f=f, diff=diff)


def _wants_doubles(sample: LaneSample) -> None:
    if any(row[n].dtype not in (torch.float64, torch.complex128) for row in sample.lanes for n in sample.diff):
        raise NoOracle("differences need double precision")


def _second(sample: LaneSample, layout: Layout, run: Callable, each: Callable, calls: int = CALLS) -> float:
    """A second derivative along two directions, of one example or of each lane, against differences of gradients."""
    _wants_doubles(sample)
    tangents = directions_of(sample)
    mapped = Layout(tuple(layout.in_dims[n] for n in sample.diff), layout.lanes)
    want = loop_over(lambda i: each(lane(sample.lanes, layout, i), lane(tangents, mapped, i)), layout)
    # Differences of first derivatives are good to about the root of the precision, in relation to all of them.
    # Where they are not finite (the logarithm of a negative number), there is nothing to compare with.
    scale = 1 + max((t[t.isfinite()].abs().max().item() for t in want if t.isfinite().any()), default=0.0)

    def judge(got: Tensors) -> float:
        worst = 0.0
        for a, b in zip(got, want, strict=True):
            if a.shape != b.shape:
                raise Mismatch(f"second derivative: shape {list(a.shape)} instead of {list(b.shape)}")
            check_plain(a, b, "second derivative")
            defined = b.isfinite()
            gap = (a - b)[defined].abs().nan_to_num(nan=float("inf")).max().item() if defined.any() else 0.0
            if not gap <= 2e-5 * scale:
                raise Mismatch(f"second derivative: differs by {gap:.2g} where values go up to {scale:.2g}", gap)
            worst = max(worst, gap / scale)
        return worst

    return in_each_call(lambda: run(pack(sample.lanes, layout), pack(tangents, mapped)), judge, calls)


def _product(f: Callable, diff: tuple[int, ...]) -> Callable[[Tensors, Tensors], Tensors]:
    """Hessian of `loss(f(*args))` times tangents, by differences of plain autograd's gradients."""

    def each(args: Tensors, tangents: Tensors) -> Tensors:
        ends = []
        for step in (STEP, -STEP):
            moved = tuple((args[n] + step * t).detach() for n, t in zip(diff, tangents, strict=True))
            ends.append(lane_grad(f, filled(args, diff, moved), diff))
        return tuple((a - b) / (2 * STEP) for a, b in zip(*ends, strict=True))

    return each


def _scalar(f: Callable, diff: tuple[int, ...], args: Tensors) -> Callable:
    return lambda *new: loss(f(*filled(args, diff, new)))


def _forward_over_reverse(f: Callable, diff: tuple[int, ...], args: Tensors, tangents: Tensors) -> Tensors:
    gradient = lanewise.grad(_scalar(f, diff, args), argnums=tuple(range(len(diff))))
    return lanewise.jvp(gradient, tuple(args[n] for n in diff), tangents)[1]


def _reverse_over_forward(f: Callable, diff: tuple[int, ...], args: Tensors, tangents: Tensors) -> Tensors:
    def slope(*new: torch.Tensor) -> torch.Tensor:
        return lanewise.jvp(_scalar(f, diff, args), new, tangents)[1]

    return lanewise.grad(slope, argnums=tuple(range(len(diff))))(*[args[n] for n in diff])


def _reverse_over_reverse(f: Callable, diff: tuple[int, ...], args: Tensors, tangents: Tensors) -> Tensors:
    every = tuple(range(len(diff)))

    def along(*new: torch.Tensor) -> torch.Tensor:
        gradients = lanewise.grad(_scalar(f, diff, args), argnums=every)(*new)
        terms = [(t.conj() * g).sum().real for t, g in zip(tangents, gradients, strict=True)]
        return sum(terms, torch.zeros((), dtype=torch.float64))

    return lanewise.grad(along, argnums=every)(*[args[n] for n in diff])


def _forward_over_forward(f: Callable, diff: tuple[int, ...], args: Tensors, tangents: Tensors) -> Tensors:
    def slope(*new: torch.Tensor) -> torch.Tensor:
        return lanewise.jvp(_scalar(f, diff, args), new, tangents)[1]

    return (lanewise.jvp(slope, tuple(args[n] for n in diff), tangents)[1],)


def _curvature(f: Callable, diff: tuple[int, ...]) -> Callable[[Tensors, Tensors], Tensors]:
    product = _product(f, diff)

    def each(args: Tensors, tangents: Tensors) -> Tensors:
        if not loss(f(*args)).isfinite():
            raise NoOracle("a sum that is infinite has no slope")
        rows = product(args, tangents)
        return (
            sum(((t.conj() * h).sum().real for t, h in zip(tangents, rows, strict=True)), torch.zeros(())).double(),
        )

    return each


def _check_second(way: Callable, oracle: Callable, lanes: bool) -> Callable:
    def check_second(sample: LaneSample, layout: Layout, random: bool, values: bool) -> float:
        """A second derivative of one example (in_dims play no part), or of lanes in front."""
        if layout.lanes != 1 or any(dim != 0 for dim in layout.in_dims):
            raise NoOracle("one layout is enough")
        wants_grad(sample)
        sample = _with_derivatives(sample)
        if not lanes:
            alone = Layout(tuple(None for _ in layout.in_dims), 1)

            def run(args: Tensors, tangents: Tensors) -> Tensors:
                return tuple(t.unsqueeze(0) for t in way(sample.f, sample.diff, args, tangents))

            return _second(sample, alone, run, oracle(sample.f, sample.diff), calls=1)
        several = Layout(layout.in_dims, 2)

        in_dims = (*several.in_dims, *(several.in_dims[n] for n in sample.diff))
        count, f, diff = len(several.in_dims), unseen(sample.f), sample.diff
        mapped = lanewise.vmap(
            lambda *both: way(f, diff, both[:count], both[count:]),
            in_dims=in_dims,
            randomness="same" if random else "error",
        )

        def each_lane(args: Tensors, tangents: Tensors) -> Tensors:
            return mapped(*args, *tangents)

        return _second(sample, several, each_lane, oracle(sample.f, sample.diff))

    return check_second


def check_backward_vmap_grad(sample: LaneSample, layout: Layout, random: bool, values: bool) -> float:
    """Plain torch.autograd around vmap(grad(loss of f)), to a captured number that scales what is differentiated."""
    if layout.lanes < 2:
        raise NoOracle("more layouts than lanes are checked")
    wants_grad(sample)
    sample = _with_derivatives(sample)
    _wants_doubles(sample)
    diff, directions = sample.diff, directions_of(sample)
    mapped = Layout(tuple(layout.in_dims[n] for n in diff), layout.lanes)

    def scaled(f: Callable, c: torch.Tensor) -> Callable:
        return lambda *xs: f(*filled(xs, diff, tuple(c * xs[n] for n in diff)))

    def along(gradients: Tensors, directions: Tensors) -> torch.Tensor:
        terms = [(d.conj() * g).sum().real for d, g in zip(directions, gradients, strict=True)]
        return sum(terms, torch.zeros((), dtype=torch.float64))

    def each(i: int) -> Tensors:
        ends = []
        for step in (STEP, -STEP):
            f = scaled(sample.f, torch.tensor(1 + step, dtype=torch.float64))
            gradients = lane_grad(f, lane(sample.lanes, layout, i), diff)
            ends.append(along(gradients, lane(directions, mapped, i)))
        return ((ends[0] - ends[1]) / (2 * STEP),)

    want = loop_over(each, layout)[0]
    if not want.isfinite().all():
        raise NoOracle("a slope that is infinite")
    c = torch.ones((), dtype=torch.float64, requires_grad=True)
    f = unseen(sample.f)
    transform = lanewise.vmap(
        lanewise.grad(scaled(lambda *xs: loss(f(*xs)), c), argnums=diff),
        in_dims=layout.in_dims,
        randomness="same" if random else "error",
    )
    lanes_of_directions = [
        torch.stack([lane(directions, mapped, i)[k] for i in range(layout.lanes)]) for k in range(len(diff))
    ]

    def run() -> torch.Tensor:
        total = along(transform(*pack(sample.lanes, layout)), tuple(lanes_of_directions))
        if not total.requires_grad:
            return torch.zeros((), dtype=torch.float64)
        try:
            (slope,) = torch.autograd.grad(total, c, allow_unused=True, materialize_grads=True)
        except RuntimeError as error:
            if "is not implemented" in str(error):
                raise NoOracle("torch.autograd has no second derivative") from error
            raise
        return slope

    def mixed(i: int) -> Tensors:
        """The same by differences of values: torch's own gradient is wrong for a few ops."""
        args, direction, step = lane(sample.lanes, layout, i), lane(directions, mapped, i), 1e-4
        total = torch.zeros((), dtype=torch.float64)
        for sign in (1, -1):
            for other in (1, -1):
                moved = tuple(args[n] + other * step * d for n, d in zip(diff, direction, strict=True))
                f = scaled(sample.f, torch.tensor(1 + sign * step, dtype=torch.float64))
                total = total + sign * other * loss(f(*filled(args, diff, moved)))
        return (total / (4 * step**2),)

    def by_torch(i: int) -> Tensors:
        """What torch's own second derivative gives, which is that of its formulas for the first."""
        args = tuple(t.requires_grad_(n in diff) for n, t in enumerate(lane(sample.lanes, layout, i)))
        value = loss(scaled(sample.f, c)(*args))
        inputs = [args[n] for n in diff]
        found = torch.autograd.grad(value, inputs, create_graph=True, allow_unused=True, materialize_grads=True)
        total = along(found, lane(directions, mapped, i))
        return torch.autograd.grad(total, c, allow_unused=True, materialize_grads=True)

    def judge(got: torch.Tensor) -> float:
        scale = 1 + want.abs().max().item()
        gap = (got - want.sum()).abs().item()
        if gap <= 2e-5 * scale or (got - loop_over(mixed, layout)[0].sum()).abs() <= 1e-4 * scale:
            return min(gap / scale, 1.0)
        if not torch.allclose(got, loop_over(by_torch, layout)[0].sum(), rtol=1e-7, equal_nan=True):
            raise Mismatch(f"slope of the gradient: differs by {gap:.2g} where values go up to {scale:.2g}", gap)
        return 0.0

    return in_each_call(run, judge)


COMPOSITIONS: dict[str, Callable[[LaneSample, Layout, bool, bool], float]] = {
    "jvp_grad": _check_second(_forward_over_reverse, _product, lanes=False),
    "grad_jvp": _check_second(_reverse_over_forward, _product, lanes=False),
    "grad_grad": _check_second(_reverse_over_reverse, _product, lanes=False),
    "jvp_jvp": _check_second(_forward_over_forward, _curvature, lanes=False),
    "vmap_jvp_grad": _check_second(_forward_over_reverse, _product, lanes=True),
    "backward_vmap_grad": check_backward_vmap_grad,
    "vmap_grad_grad": _check_second(_reverse_over_reverse, _product, lanes=True),
    "vmap_jvp_jvp": _check_second(_forward_over_forward, _curvature, lanes=True),
}
