"""Random numbers: one draw for all lanes under randomness="same", one for each under "different".

"same" draws what one example would draw. "different" draws for all lanes of the whole call, those of other chunks
included, and takes its own: the numbers of a lane do not depend on how the lanes are split into chunks.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from lanewise._core.batch import BATCH_RULES, BatchLevel, BatchTensor, captured_write
from lanewise._core.draws.chunk_draws import keep_apart, note_first
from lanewise._core.draws.random import check_random, note_generator, unbatched_write
from lanewise._core.level import current_level, on_plane
from lanewise._core.plane import Plane, map_tensors, tracked
from lanewise._core.python.factories import adopt_results_of, route, route_past
from lanewise._core.rules import Rule
from lanewise._rules.batch.families import bind, leading, pointwise
from lanewise._rules.batch.operands import aligner, common_shape
from lanewise._rules.batch.rejection import METHODS, drawn
from lanewise._rules.batch.same_state import from_one_state
from lanewise._rules.batch.tracking import is_tracked
from lanewise._torch_compat import OpOverload
from lanewise.errors import TransformError, at_user_line

aten = torch.ops.aten


def random_rule(*ops: OpOverload) -> Any:
    """A rule by hand: `rule(level, op, *args, **kwargs)` on logical operands, returning tensors of the plane.

    The operations are routed to it also where no operand has lanes.
    """

    def register(fn: Any) -> Any:
        for op in ops:

            def run(level: BatchLevel, args: tuple, kwargs: dict, op: OpOverload = op) -> Any:
                check_random(level, op, args, kwargs)
                if level.randomness == "different":
                    keep_apart(level, op, args, kwargs)
                else:
                    for given in (*args, *kwargs.values()):
                        if isinstance(given, torch.Generator):
                            note_first(given)
                return fn(level, op, *args, **kwargs)

            BATCH_RULES.add(op, Rule(op, run, "random", guarded=True, raw=True))
        adopt_results_of(*ops)
        return fn

    return register


def own(level: BatchLevel, draws: Any) -> Any:
    """Draws of all lanes [total, *S] -> those of this chunk, on the plane"""
    if level.total == level.size:
        return map_tensors(level.wrap, draws)
    return map_tensors(lambda t: level.wrap(t.narrow(0, level.start, level.size)), draws)


def blank(level: BatchLevel, x: Tensor, lead: tuple[int, ...] = ()) -> Tensor:
    """A tensor to draw into, [*lead, *S] for x [*S]. A plane below adopts zeros, which then may get lanes.

    Without `lead` it is laid out as x is, since numbers are drawn in the order of memory.
    """
    make = torch.empty if level.parent is None else torch.zeros
    if lead or x.is_contiguous() or 0 in x.stride():
        return make((*lead, *x.shape), dtype=x.dtype, device=x.device)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return make(extent, dtype=x.dtype, device=x.device).as_strided(x.shape, x.stride())


def for_all(level: BatchLevel, x: Any) -> Any:
    """A parameter without lanes, [*S] -> [total, *S]"""
    return map_tensors(lambda t: level.physical(t).expand(level.total, *t.shape), x)


# --- numbers of a given shape ----------------------------------------------------------------------------------------


@random_rule(
    aten.normal.float_float,
    aten.rand.default,
    aten.rand.generator,
    aten.randint.default,
    aten.randint.generator,
    aten.randint.low,
    aten.randint.low_generator,
    aten.randn.default,
    aten.randn.generator,
)
def sized(level, op, *args, **options):
    """size -> [B, *size]"""
    if level.randomness == "same":
        return level.adopt(op(*args, **options))
    bound, rest = bind(op, args, options)
    at = [arg.name for arg in op._schema.arguments].index("size")
    bound[at] = [level.total, *bound[at]]
    return own(level, op(*bound, **rest))


@random_rule(aten.randperm.default, aten.randperm.generator)
def randperm(level, op, n, *, generator=None, dtype=torch.int64, device=None, **options):
    """-> [B, n], an order of n things in each lane"""
    if level.randomness == "same":
        if generator is not None:
            options["generator"] = generator
        return level.adopt(torch.randperm(n, dtype=dtype, device=device, **options))
    keys = torch.rand((level.total, n), generator=generator, dtype=torch.float64, device=device)
    return own(level, keys.argsort(1).to(dtype or torch.int64))


def _drawn_into(op: OpOverload) -> None:
    overload = op._schema.overload_name.removesuffix("out").rstrip("_")
    twin = getattr(getattr(aten, op._schema.name.removeprefix("aten::")), overload or "default")

    def write(level: BatchLevel, args: tuple, kwargs: dict) -> Any:
        options = dict(kwargs)
        out = options.pop("out")
        options.update(dtype=out.dtype, device=out.device)
        draws = level.below(BATCH_RULES[twin].run, level, args, options)
        return (out if out.shape == draws.shape else out.resize_(draws.shape)).copy_(draws)

    BATCH_RULES.add(op, Rule(op, write, "written twin", same_plane=True))


for _op in (
    aten.normal.float_float_out,
    aten.rand.generator_out,
    aten.rand.out,
    aten.randint.generator_out,
    aten.randint.low_generator_out,
    aten.randint.low_out,
    aten.randint.out,
    aten.randperm.generator_out,
    aten.randperm.out,
):
    _drawn_into(_op)


@random_rule(
    aten.cauchy.default,
    aten.exponential.default,
    aten.geometric.default,
    aten.log_normal.default,
    aten.normal_functional.default,
    aten.rand_like.default,
    aten.rand_like.generator,
    aten.randint_like.default,
    aten.randint_like.generator,
    aten.randint_like.low_dtype,
    aten.randint_like.low_generator_dtype,
    aten.randn_like.default,
    aten.randn_like.generator,
    aten.random.default,
    getattr(aten.random, "from"),
    aten.random.to,
    aten.uniform.default,
    aten.bernoulli.p,
)
def like(level, op, x, *args, memory_format=None, **options):
    """x [*S], of which only the shape matters -> [B, *S]"""
    if level.randomness == "same":
        return level.adopt(op(blank(level, x), *args, **options))
    return own(level, op(blank(level, x, (level.total,)), *args, **options))


def _below_tensor(x: Tensor, high: Tensor, **options: Any) -> Tensor:
    return torch.randint_like(x, int(high), **options)


route(aten.randint_like.Tensor, _below_tensor)
route(aten.randint_like.Tensor_generator, _below_tensor)


@random_rule(
    aten.bernoulli_.float,
    aten.cauchy_.default,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.normal_.default,
    aten.random_.default,
    getattr(aten.random_, "from"),
    aten.random_.to,
    aten.uniform_.default,
)
def fill(level, op, x, *args, **options):
    """x [B, *S] <- random numbers"""
    if not level.owns(x):
        if level.randomness == "same" or x.is_meta:
            return op(x, *args, **options)
        raise unbatched_write(op, "self")
    if level.randomness == "same":
        x.value.copy_(op(blank(level, x), *args, **options))
    elif level.total == level.size and x.value.is_contiguous() and not isinstance(x.value, Plane):
        op(x.value, *args, **options)
    else:
        draws = op(blank(level, x, (level.total,)), *args, **options)
        x.value.copy_(draws.narrow(0, level.start, level.size))
    return x


def tied(level: BatchLevel, out: Tensor, *parameters: Any) -> Tensor:
    """`out` as a function of its parameters that has the derivative zero, which is torch's."""
    for x in parameters:
        if isinstance(x, Tensor):
            below = level.physical(x)
            if tracked(below) and torch.is_grad_enabled():
                lanes = below.shape[:1] if level.mapped(x) else ()
                rank = out.dim() - len(lanes) - x.dim()
                never = torch.zeros((), dtype=torch.bool, device=x.device)
                out = torch.where(never, below.reshape(*lanes, *[1] * rank, *x.shape).to(out.dtype), out)
    return out


def _check_numbers(level: BatchLevel, x: Any, text: str, holds: Any) -> None:
    """Raise unless it holds for a parameter, as kernels of the CPU do."""
    with on_plane(None):
        numbers = plain_numbers(level.physical(x)) if isinstance(x, Tensor) else torch.tensor(x)
        if numbers.is_cpu and not holds(numbers).all():
            raise TransformError(at_user_line(f"vmap: {text}"))


def plain_numbers(x: Any) -> Tensor:
    """The numbers of all lanes that run, in any order."""
    while isinstance(x, Plane):
        x = x.level.here(x).value if isinstance(x, BatchTensor) else x.value
    return x.detach()


def _check_odds(level: BatchLevel, p: Tensor) -> None:
    _check_numbers(level, p, "bernoulli: expected 0 <= p <= 1", lambda x: (x >= 0) & (x <= 1))


# --- numbers from parameters -----------------------------------------------------------------------------------------


def standard(level: BatchLevel, draw: Any, shape: Any, like: Tensor, generator: Any) -> Tensor:
    """Standard numbers [B, *shape] by torch.rand or torch.randn, or [*shape], the same for all lanes."""
    lead = () if level.randomness == "same" else (level.total,)
    out = draw((*lead, *shape), generator=generator, dtype=like.dtype, device=like.device)
    return out.narrow(0, level.start, level.size) if lead else out


def _deviating(std: float, shape: Any, *, generator: Any, dtype: Any, device: Any) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_(0, std, generator=generator)


@random_rule(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor)
def normal(level, op, mean, std=1.0, *, generator=None):
    """mean, std [B, *S], [*S] or numbers -> [B, *S]"""
    given = [arg for arg in (mean, std) if isinstance(arg, Tensor)]
    shape = common_shape(*given)
    _check_numbers(level, std, "normal expects all elements of std >= 0.0", lambda x: x >= 0)
    dtype = given[0].dtype
    # torch draws numbers of one deviation, and rounds products with others before it adds the means.
    draw = torch.randn if isinstance(std, Tensor) else partial(_deviating, std)
    numbers = standard(level, draw, shape, given[0], generator)

    def enter(arg: Any) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        below = level.physical(arg).detach()
        if not level.mapped(arg):
            return below
        return below.reshape(level.size, *[1] * (len(shape) - arg.dim()), *arg.shape)

    if isinstance(std, Tensor):
        numbers = (numbers * enter(std)).to(dtype)
    out = tied(level, (numbers + enter(mean)).to(dtype), *given)
    lanes = level.randomness == "different" or any(level.mapped(arg) for arg in given)
    return level.wrap(out) if lanes else level.adopt(out)


@random_rule(aten.bernoulli.default)
def bernoulli(level, op, p, *, generator=None):
    """p [B, *S] or [*S] -> zeros and ones [B, *S]"""
    if not level.mapped(p):
        if level.randomness == "same":
            return level.adopt(op(level.physical(p), generator=generator))
        return own(level, op(for_all(level, p), generator=generator))
    if level.randomness == "same" and not _compares(p):
        return level.wrap(from_one_state(level, op, (p,), {"generator": generator}))
    _check_odds(level, p)
    out = (standard(level, torch.rand, p.shape, p, generator) < p.value).to(p.dtype)
    return level.wrap(tied(level, out, p))


def _compares(p: Tensor) -> bool:
    """Whether torch's kernel compares the numbers that `torch.rand` draws with the probabilities."""
    return p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64)


@random_rule(aten.bernoulli.Tensor, aten.bernoulli_.Tensor)
def bernoulli_by_tensor(level, op, x, p, *, generator=None):
    """x [B, *S], of which only the shape matters, p [B, *P] or [*P] -> zeros and ones [B, *S]"""
    writes = op._schema.is_mutable
    if not level.owns(x) and writes:
        if level.mapped(p):
            raise captured_write(op, "self", x)
        if level.randomness == "same":
            return op(x, level.physical(p), generator=generator)
        raise unbatched_write(op, "self")
    odds = level.physical(p)
    if level.mapped(p):
        odds = odds.reshape(level.size, *[1] * (x.dim() - p.dim()), *p.shape)
    if level.randomness == "different":
        _check_odds(level, p)
        out = (standard(level, torch.rand, x.shape, p, generator) < odds).to(x.dtype)
    elif not level.mapped(p):
        out = aten.bernoulli.Tensor(blank(level, x), odds, generator=generator)
    elif _compares(p):
        _check_odds(level, p)
        out = (blank(level, x).to(p.dtype).uniform_(generator=generator) < odds).to(x.dtype)
    else:
        out = from_one_state(level, aten.bernoulli.Tensor, (blank(level, x), p), {"generator": generator})
    if writes:
        x.value.copy_(out)
        return x
    return level.wrap(out) if out.dim() > x.dim() else level.adopt(out)


@random_rule(aten._sample_dirichlet.default, aten._standard_gamma.default, aten.binomial.default, aten.poisson.default)
def sampled(level, op, *args, generator=None):
    """Parameters [B, *S] or [*S] -> [B, *S], by methods that draw a number of numbers that depends on them."""
    if args and isinstance(args[-1], torch.Generator):
        *args, generator = args
        note_generator(level, generator)
    if not any(level.mapped(arg) for arg in args):
        if level.randomness == "same":
            return level.adopt(op(*[level.physical(arg) for arg in args], generator))
        return own(level, op(*[for_all(level, arg) for arg in args], generator))
    if level.randomness == "same":
        return level.wrap(from_one_state(level, op, tuple(args), {"generator": generator}))
    args = [arg if level.mapped(arg) else level.physical(arg) for arg in args]
    align, shape = aligner(level, args, promote=False), common_shape(*args)
    values = [align(arg).expand(level.size, *shape) for arg in args]
    if args[0].is_meta:
        return level.wrap(op(*values))  # of numbers that there are none of
    if not args[0].dtype.is_floating_point:
        raise TransformError(
            at_user_line(f"{op}: parameters are floating-point numbers, got {args[0].dtype}", "x.float()")
        )
    seed = torch.randint(2**62, (), generator=generator)
    if not level.size:
        return level.wrap(op(*values, generator))
    if op is aten.poisson.default:
        _check_numbers(level, args[0], "poisson: expected rates >= 0", lambda x: x >= 0)
    numbers = drawn(METHODS[op], (level.start, level.size, level.total), seed, *values).to(values[0].dtype)
    if op is aten.poisson.default:
        return level.wrap(tied(level, numbers, *args))
    if not any(map(is_tracked, values)):
        return level.wrap(numbers)
    return level.wrap((_OfShape if op is aten._standard_gamma.default else _Underivable).apply(op, numbers, *values))


class _OfShape(Function):
    """Gamma numbers with the derivative in their shape that torch gives them, once."""

    @staticmethod
    def forward(ctx: Any, op: OpOverload, numbers: Tensor, shape: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(shape, numbers)
        ctx.save_for_forward(shape, numbers)
        return numbers.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple:  # type: ignore[override]
        return None, None, cotangent * aten._standard_gamma_grad(*ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, _op: Any, _numbers: Any, tangent: Tensor) -> Tensor:  # type: ignore[override]
        return tangent * aten._standard_gamma_grad(*ctx.saved_tensors)


class _Underivable(Function):
    """Numbers that torch gives no derivative in their parameters."""

    @staticmethod
    def forward(ctx: Any, op: OpOverload, numbers: Tensor, *parameters: Tensor) -> Tensor:  # type: ignore[override]
        ctx.op = op
        return numbers.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple:  # type: ignore[override]
        raise _no_derivative(ctx.op)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:  # type: ignore[override]
        raise _no_derivative(ctx.op)


def _no_derivative(op: OpOverload) -> TransformError:
    name = op._schema.name
    return TransformError(at_user_line(f"derivative for {name} is not implemented", "x.detach()  # what it draws from"))


pointwise(aten._standard_gamma_grad.default)
leading(aten._dirichlet_grad.default)


@random_rule(aten.multinomial.default)
def multinomial(level, op, p, num_samples, replacement=False, *, generator=None):
    """p [B, n] or [B, m, n], not normalised -> [B, (m,) num_samples]"""
    same = level.randomness == "same"
    if same and not level.mapped(p):
        return level.adopt(op(level.physical(p), num_samples, replacement, generator=generator))
    if same and replacement and num_samples > 1:
        return level.wrap(from_one_state(level, op, (p, num_samples, replacement), {"generator": generator}))
    odds = level.expanded(p).detach()
    choices = _check_distribution(p, odds, num_samples, replacement)
    if replacement and not same:
        steps = odds.cumsum(-1)
        numbers = standard(level, torch.rand, (*p.shape[:-1], num_samples), odds, generator)
        places = torch.searchsorted(steps / steps[..., -1:], numbers.contiguous(), right=True)
        return level.wrap(places.clamp_max(choices - 1))
    # The order of p / q, with q exponential, is that of draws without replacement.
    lead = () if same else (level.total,)
    waits = blank(level, p, lead).exponential_(generator=generator)
    ratios = odds / (waits if same else waits.narrow(0, level.start, level.size))
    # As torch does, of equal ones the first.
    return level.wrap(ratios.argmax(-1, True) if num_samples == 1 else ratios.topk(num_samples, -1).indices)


def _check_distribution(p: Tensor, odds: Tensor, num_samples: int, replacement: bool) -> int:
    why = None
    if p.dim() not in (1, 2):
        why = "prob_dist must be 1 or 2 dim"
    elif num_samples <= 0:
        why = "cannot sample n_sample <= 0 samples"
    elif not replacement and num_samples > p.shape[-1]:
        why = "cannot sample n_sample > prob_dist.size(-1) samples without replacement"
    elif odds.device.type == "cpu" and odds.numel():
        with on_plane(None):
            numbers = plain_numbers(odds)
            if not ((numbers >= 0) & numbers.isfinite()).all():
                why = "probability tensor contains either `inf`, `nan` or element < 0"
            elif not (numbers.sum(-1) > 0).all():
                why = "invalid multinomial distribution (sum of probabilities <= 0)"
    if why is not None:
        raise TransformError(at_user_line(f"vmap: multinomial: {why}"))
    return p.shape[-1]


# --- what no tensor of the plane takes part in ------------------------------------------------------------------------


def _drawn_apart(*args: Any, **kwargs: Any) -> Any:
    """Numbers drawn into plain tensors, or by kernels of a device: seen where these stand for wrappers."""
    level = current_level()
    if level is not None and level.shares:
        level.note_within()
    return NotImplemented


_DRAWN_INTO = (
    "_sample_dirichlet _standard_gamma bernoulli binomial cauchy exponential geometric log_normal multinomial "
    "native_dropout normal poisson rand rand_like randint randint_like randn randn_like random randperm "
    "rrelu_with_noise uniform"
)
_BY_DEVICES = (
    "_cudnn_rnn miopen_rnn _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_flash_attention"
)
for _name in _DRAWN_INTO.split():
    for _overload in getattr(aten, _name).overloads():
        if _overload.endswith("out"):
            route_past(getattr(getattr(aten, _name), _overload), _drawn_apart)
for _name in _BY_DEVICES.split():
    route_past(getattr(aten, _name).default, _drawn_apart)
