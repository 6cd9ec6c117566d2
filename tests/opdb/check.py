"""One op through one composition of transforms, against a plain loop over its lanes.

Values of the oracle come from calling the op once per lane; gradients from `torch.autograd.grad` per lane; tangents
from differentiating the lane's vector-Jacobian product in its cotangent (central differences where torch cannot).
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lanewise
from lanewise._core.missing import lane_loops
from lanewise._gaps import REFUSALS

from .samples import MAX_LANES, OPS, UNINITIALISED, LaneSample, choose_dtype, lane_samples

Tensors = tuple[torch.Tensor, ...]
_TOLERANCES = {  # dtype of the result -> (relative, absolute)
    torch.float64: (1e-7, 1e-9),
    torch.complex128: (1e-7, 1e-9),
    torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5),
    torch.float16: (2e-2, 2e-3),
    torch.bfloat16: (5e-2, 2e-2),
}
STEP = 1e-6


class Mismatch(Exception):
    """A result that differs from the oracle's. `size` is the largest difference, infinite where that says nothing."""

    def __init__(self, text: str, size: float = float("inf")):
        super().__init__(text)
        self.size = size


class NoOracle(Exception):
    """Plain torch cannot do this either, so there is nothing to compare with."""


@dataclass
class Outcome:
    """What became of one op in one composition."""

    name: str
    composition: str
    status: str = "none"  # ok, wrong, error, none (nothing to check), crash, timeout
    detail: str = ""
    where: str = ""  # sample, in_dims and number of lanes of the failure
    worst: float = 0.0
    checked: int = 0
    failed: int = 0
    refused: int = 0  # layouts that are refused on purpose (lanewise._gaps.REFUSALS)
    slow: list[str] = field(default_factory=list)  # ops that went through the loop over lanes

    def to_dict(self) -> dict:
        """The fields as plain data, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Layout:
    """Where the lanes of each tensor lie (None: not mapped) and how many there are."""

    in_dims: tuple[int | None, ...]
    lanes: int


def layouts(lane: Tensors, full: bool = True) -> Iterator[Layout]:
    """All tensors mapped in front (3, 1 and no lanes) and at the end, then each alone."""
    front = tuple(0 for _ in lane)
    back = tuple(t.dim() for t in lane)
    yield Layout(front, 3)
    yield Layout(back, 2)
    if len(lane) > 1:
        for k, tensor in enumerate(lane[:3]):
            yield Layout(tuple((min(1, tensor.dim()) if n == k else None) for n in range(len(lane))), 2)
    if full:
        yield Layout(front, 1)
        yield Layout(back, 0)


def pack(values: list[Tensors], layout: Layout) -> Tensors:
    """The tensors to hand to the transform: lanes stacked along their in_dim."""
    packed = []
    for k, dim in enumerate(layout.in_dims):
        if dim is None:
            packed.append(values[0][k].clone())
        elif layout.lanes == 0:
            first = values[0][k]
            packed.append(first.new_empty((*first.shape[:dim], 0, *first.shape[dim:])))
        else:
            packed.append(torch.stack([v[k] for v in values[: layout.lanes]]).movedim(0, dim))
    return tuple(packed)


def lane(values: list[Tensors], layout: Layout, index: int) -> Tensors:
    """What one lane sees."""
    return tuple(values[0 if dim is None else index][k].clone() for k, dim in enumerate(layout.in_dims))


def stack(results: list[Tensors], lanes: int) -> Tensors:
    """The loop's results as one tensor per output; with no lanes, only shape and dtype count."""
    if lanes == 0:
        return tuple(t.new_empty((0, *t.shape)) for t in results[0])
    return tuple(torch.stack(column) for column in zip(*results, strict=True))


def compare(got, want: Tensors, what: str, values: bool = True) -> float:
    """The largest difference, or Mismatch."""
    worst = 0.0
    if len(got) != len(want):
        raise Mismatch(f"{what}: {len(got)} results instead of {len(want)}")
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        label = f"{what}[{n}]"
        if a.dtype != b.dtype or a.shape != b.shape:
            raise Mismatch(f"{label}: {a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}")
        if not values or not b.numel():
            continue
        rtol, atol = _TOLERANCES.get(b.dtype, (0, 0))
        a, b = a.detach().resolve_conj().resolve_neg(), b.detach().resolve_conj().resolve_neg()
        if b.dtype.is_floating_point or b.dtype.is_complex:
            both_nan = a.isnan() & b.isnan()
            difference = torch.nan_to_num((a - b).abs().double(), nan=float("inf")).masked_fill(both_nan | (a == b), 0)
        else:
            difference = (a.to(torch.float64) - b.to(torch.float64)).abs()
        size = difference.max().item()
        worst = max(worst, size)
        if not torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True):
            raise Mismatch(f"{label}: differs by {size:.3g} (largest value {b.abs().max().item():.3g})", size)
    return worst


def _floats(out: Tensors) -> Tensors:
    return tuple(t for t in out if t.dtype.is_floating_point or t.dtype.is_complex)


def _weights(out: torch.Tensor, shape) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64).cos() + 0.5).reshape(shape).to(out.dtype)


def loss(out: Tensors, lead: int = 0) -> torch.Tensor:
    """A weighted sum of all float outputs; weights are the same in all lanes, which fill the first `lead` dims."""
    terms = [(t * _weights(t, t.shape[lead:])).sum() for t in _floats(out)]
    return sum((term.real for term in terms), torch.zeros((), dtype=torch.float64))


def lane_grad(f: Callable, args: Tensors, diff: tuple[int, ...]) -> Tensors:
    """Gradients of `loss(f(*args))` by plain autograd."""
    args = tuple(t.requires_grad_() if n in diff else t for n, t in enumerate(args))
    value = loss(f(*args))
    if not value.requires_grad:
        raise NoOracle("not differentiable")
    return torch.autograd.grad(value, [args[n] for n in diff], allow_unused=True, materialize_grads=True)


def filled(args: Tensors, diff: tuple[int, ...], new: Tensors) -> Tensors:
    full = list(args)
    for n, tensor in zip(diff, new, strict=True):
        full[n] = tensor
    return tuple(full)


def lane_jvp(f: Callable, args: Tensors, diff: tuple[int, ...], tangents: Tensors) -> Tensors:
    """Tangents of the float outputs: the derivative of the vjp in its cotangent, else central differences."""
    primals = [args[n].requires_grad_() for n in diff]
    out = _floats(f(*filled(args, diff, tuple(primals))))
    tracked = [t for t in out if t.requires_grad]
    if not tracked:
        raise NoOracle("not differentiable")
    try:
        if any(t.dtype.is_complex for t in (*primals, *tracked)):
            raise RuntimeError("conjugates")
        cotangents = [torch.zeros_like(t, requires_grad=True) for t in tracked]
        grads = torch.autograd.grad(
            tracked, primals, cotangents, create_graph=True, allow_unused=True, materialize_grads=True
        )
        if not any(g.requires_grad for g in grads):
            return tuple(torch.zeros_like(t) for t in out)
        found = iter(torch.autograd.grad(grads, cotangents, tangents, allow_unused=True, materialize_grads=True))
    except (RuntimeError, NotImplementedError):
        return central_difference(f, args, diff, tangents)
    return tuple(next(found) if t.requires_grad else torch.zeros_like(t) for t in out)


def central_difference(f: Callable, args: Tensors, diff: tuple[int, ...], tangents: Tensors) -> Tensors:
    """Tangents of the float outputs by (f(x + ht) - f(x - ht)) / 2h."""
    primals = [args[n].detach() for n in diff]
    ends = []
    for step in (STEP, -STEP):
        moved = tuple(p + step * t for p, t in zip(primals, tangents, strict=True))
        ends.append(_floats(f(*(t.detach() for t in filled(args, diff, moved)))))
    if any(t.dtype not in (torch.float64, torch.complex128) for t in ends[0]):
        raise NoOracle("differences need double precision")
    return tuple((a - b) / (2 * STEP) for a, b in zip(*ends, strict=True))


def directions_of(sample: LaneSample) -> list[Tensors]:
    generator = torch.Generator().manual_seed(5)
    return [
        tuple(torch.randn(lane[n].shape, dtype=lane[n].dtype, generator=generator) for n in sample.diff)
        for lane in sample.lanes
    ]


def loop_over(each: Callable[[int], Tensors], layout: Layout) -> Tensors:
    """Oracle: `each` on every lane, stacked."""
    try:
        results = [each(i) for i in range(max(1, layout.lanes))]
    except NoOracle:
        raise
    except Exception as error:
        raise NoOracle(f"{type(error).__name__}: {error}") from error
    try:
        return stack(results, layout.lanes)
    except RuntimeError as error:
        raise NoOracle("results of different shapes in different lanes") from error


def _seeded(f: Callable) -> Callable:
    def g(*args):
        torch.manual_seed(0)
        return f(*args)

    return g


class _Tags(TorchDispatchMode):
    """Gathers the tags of the ops that go by."""

    def __init__(self):
        super().__init__()
        self.found: set[torch.Tag] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.update(func.tags)
        return func(*args, **(kwargs or {}))


def tags(sample: LaneSample) -> set[torch.Tag]:
    """The tags of the ops that the sample runs through."""
    with _Tags() as mode:
        sample.f(*(t.clone() for t in sample.lanes[0]))
    return mode.found


def _vmap(sample: LaneSample, in_dims: tuple, random: bool) -> Callable:
    """The op mapped; one that draws gets the seed of each lane of the loop, and the same numbers in all lanes."""
    return lanewise.vmap(sample.f, in_dims=in_dims, randomness="same" if random else "error")


def check_vmap(sample: LaneSample, layout: Layout, random: bool, values: bool) -> float:
    """vmap(f) against the loop."""
    packed = pack(sample.lanes, layout)
    want = loop_over(lambda i: sample.f(*lane(sample.lanes, layout, i)), layout)
    if random:
        got = lanewise.vmap(sample.f, in_dims=layout.in_dims, randomness="different")(*packed)
        compare(got, want, "output of randomness='different'", values=False)
    return compare(_vmap(sample, layout.in_dims, random)(*packed), want, "output", values)


def check_vmap_vmap(sample: LaneSample, layout: Layout, random: bool, values: bool) -> float:
    """vmap(vmap(f)): outer lanes in front of the inner ones; lane (i, j) holds the numbers of lane i + j."""
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

    def each(i):
        results = []
        for j in range(2):
            args = [sample.lanes[0 if dim is None else (i + j) % MAX_LANES][k] for k, dim in enumerate(outer_dims)]
            results.append(sample.f(*(t.clone() for t in args)))
        return stack(results, 2)

    want = loop_over(each, layout)
    got = lanewise.vmap(
        _vmap(sample, layout.in_dims, random), in_dims=outer_dims, randomness="same" if random else "error"
    )(*packed)
    return compare(got, want, "output", values)


def wants_grad(sample: LaneSample) -> None:
    if not sample.diff:
        raise NoOracle("no differentiable argument")


def check_vmap_grad(sample: LaneSample, layout: Layout, random: bool, values: bool) -> float:
    """vmap(grad(loss of f)) against autograd per lane."""
    wants_grad(sample)
    want = loop_over(lambda i: lane_grad(sample.f, lane(sample.lanes, layout, i), sample.diff), layout)
    transform = lanewise.grad(lambda *xs: loss(sample.f(*xs)), argnums=sample.diff)
    mapped = lanewise.vmap(transform, in_dims=layout.in_dims, randomness="same" if random else "error")
    got = mapped(*pack(sample.lanes, layout))
    try:
        return compare(got, want, "gradient")
    except Mismatch:
        # torch's own gradient is wrong for a few ops; differences along a direction say which of the two is right.
        tangents = directions_of(sample)
        places = Layout(tuple(layout.in_dims[n] for n in sample.diff), layout.lanes)
        f = lambda *xs: (loss(sample.f(*xs)),)
        for i in range(layout.lanes):
            args, direction = lane(sample.lanes, layout, i), lane(tangents, places, i)
            along = sum((g[i].conj() * d).sum().real for g, d in zip(got, direction, strict=True))
            (want_along,) = central_difference(f, args, sample.diff, direction)
            if not torch.isclose(want_along.double(), along.double(), rtol=1e-4, atol=1e-5):
                raise
        return 0.0


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
    mapped = _vmap(sample, layout.in_dims, random)
    transform = lanewise.grad(lambda *xs: loss(mapped(*xs), lead=1), argnums=sample.diff)
    return _compare_gradients(transform(*pack(sample.lanes, layout)), want, sample, layout)


def check_backward_vmap(sample: LaneSample, layout: Layout, random: bool, values: bool) -> float:
    """Plain torch.autograd around vmap(f)."""
    wants_grad(sample)
    want = _grad_of_sum(sample, layout)
    packed = tuple(
        t.detach().requires_grad_() if n in sample.diff else t for n, t in enumerate(pack(sample.lanes, layout))
    )
    value = loss(_vmap(sample, layout.in_dims, random)(*packed), lead=1)
    leaves = [packed[n] for n in sample.diff]
    if layout.lanes and not value.requires_grad:
        raise Mismatch("the output does not require grad")
    if not value.requires_grad:
        raise NoOracle("no lanes")
    got = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    return _compare_gradients(got, want, sample, layout)


def _check_forward(sample: LaneSample, layout: Layout, run: Callable[[Tensors, Tensors], Tensors]) -> float:
    tangents = directions_of(sample)
    mapped = Layout(tuple(layout.in_dims[n] for n in sample.diff), layout.lanes)

    def each(oracle):
        return lambda i: oracle(sample.f, lane(sample.lanes, layout, i), sample.diff, lane(tangents, mapped, i))

    want = loop_over(each(lane_jvp), layout)
    got = run(pack(sample.lanes, layout), pack(tangents, mapped))
    try:
        return compare(got, want, "tangent")
    except Mismatch as mismatch:
        # torch's own double backward is wrong for a few ops; differences decide then, as far as they can.
        second = loop_over(each(central_difference), layout)
        if all(torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True) for a, b in zip(got, second, strict=True)):
            return mismatch.size
        raise


def _jvp(f: Callable, diff: tuple[int, ...], args: Tensors, tangents: Tensors) -> Tensors:
    def g(*new):
        return _floats(f(*filled(args, diff, new)))

    return lanewise.jvp(g, tuple(args[n] for n in diff), tangents)[1]


def check_jvp(sample: LaneSample, layout: Layout, random: bool, values: bool) -> float:
    """jvp(f) of a single example (in_dims play no part)."""
    wants_grad(sample)
    if layout.lanes != 1:
        raise NoOracle("one example")
    unmapped = Layout(tuple(None for _ in layout.in_dims), 1)

    def run(args, tangents):
        return tuple(t.unsqueeze(0) for t in _jvp(sample.f, sample.diff, args, tangents))

    return _check_forward(sample, unmapped, run)


def check_vmap_jvp(sample: LaneSample, layout: Layout, random: bool, values: bool) -> float:
    """vmap(jvp(f)) against tangents per lane."""
    wants_grad(sample)
    mapped = tuple(layout.in_dims[n] for n in sample.diff)
    if all(dim is None for dim in mapped) and all(dim is None for dim in layout.in_dims):
        raise NoOracle("nothing mapped")

    def run(args, tangents):
        def one(args, tangents):
            return _jvp(sample.f, sample.diff, args, tangents)

        in_dims, randomness = (layout.in_dims, mapped), "same" if random else "error"
        return lanewise.vmap(one, in_dims=in_dims, randomness=randomness)(args, tangents)

    return _check_forward(sample, layout, run)


def check_jvp_vmap(sample: LaneSample, layout: Layout, random: bool, values: bool) -> float:
    """jvp(vmap(f)) against tangents per lane."""
    wants_grad(sample)

    def run(args, tangents):
        return _jvp(_vmap(sample, layout.in_dims, random), sample.diff, args, tangents)

    return _check_forward(sample, layout, run)


COMPOSITIONS: dict[str, Callable[[LaneSample, Layout, bool, bool], float]] = {
    "vmap": check_vmap,
    "vmap_grad": check_vmap_grad,
    "grad_vmap": check_grad_vmap,
    "vmap_vmap": check_vmap_vmap,
    "vmap_inplace": check_vmap,
    "backward_vmap": check_backward_vmap,
    "jvp": check_jvp,
    "vmap_jvp": check_vmap_jvp,
    "jvp_vmap": check_jvp_vmap,
}
MAIN = ("vmap", "vmap_grad", "grad_vmap")
_WITHOUT_GRAD = ("vmap", "vmap_vmap", "vmap_inplace")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def check(name: str, composition: str, cap: int = 6, show: bool = False) -> Outcome:
    """One op of op_db through one composition, over samples, in_dims and lanes; `show` prints tracebacks."""
    op = OPS[name]
    outcome = Outcome(name, composition)
    if not op.supported_dtypes("cpu"):
        return outcome
    with_grad = composition not in _WITHOUT_GRAD
    if with_grad and not (choose_dtype(op).is_floating_point or choose_dtype(op).is_complex):
        return outcome
    inplace = composition == "vmap_inplace"
    if (with_grad and not op.supports_autograd) or (inplace and op.inplace_variant is None):
        return outcome
    run = COMPOSITIONS[composition]
    loops = dict(lane_loops)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in lane_samples(op, with_grad, cap, inplace):
            if not sample.lanes[0]:
                continue
            try:
                found = tags(sample)
            except Exception:
                continue  # plain torch refuses the sample
            random = torch.Tag.nondeterministic_seeded in found
            if random:
                sample.f = _seeded(sample.f)
            for layout in layouts(sample.lanes[0]):
                if layout.lanes == 0 and (
                    name == "tensor_split" or found & {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
                ):
                    continue  # no lane says how large the result would be
                _one(outcome, run, sample, layout, random, show)
    if outcome.refused and not outcome.checked:
        outcome.status, outcome.detail = "error", "refused throughout"
    outcome.slow = sorted(op for op, count in lane_loops.items() if count != loops.get(op))
    return outcome


_RANK = {"none": 0, "ok": 1, "error": 2, "wrong": 3}


def _one(outcome: Outcome, run: Callable, sample: LaneSample, layout: Layout, random: bool, show: bool) -> None:
    status, detail, trace = "ok", "", []
    try:
        outcome.worst = max(outcome.worst, run(sample, layout, random, outcome.name not in UNINITIALISED))
    except NoOracle:
        return
    except Mismatch as mismatch:
        status, detail = "wrong", str(mismatch)
        outcome.worst = max(outcome.worst, mismatch.size)
    except Exception as error:
        if any(phrase in str(error) for phrase in REFUSALS):
            outcome.refused += 1
            return
        status, detail, trace = "error", _first_line(error), traceback.format_exception(error)
    outcome.checked += 1
    outcome.failed += status != "ok"
    if _RANK[status] > _RANK[outcome.status]:
        outcome.status, outcome.detail = status, detail
        if detail:
            outcome.where = f"({sample.text}) in_dims={layout.in_dims} lanes={layout.lanes}"
            if show:
                print(outcome.name, outcome.where, *trace, sep="\n", file=sys.stderr)
