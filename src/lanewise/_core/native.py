"""Tangents by torch's own formulas: forward-mode AD of one operation, or two reverse passes where it has none."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from lanewise._core.level import pin_grad_mode
from lanewise._core.plane import Plane, detached, recorded, replace_tensors, tensors_of
from lanewise._core.trees import flatten, unflatten
from lanewise._torch_compat import (
    AUTOGRAD_KEY,
    apply_plainly,
    forward_ad,
    forward_level,
    is_grad_enabled,
    make_dual,
    set_grad_enabled,
    tls_is_excluded,
)

# How often each operation took torch's own formula; tests of hot paths count on it.
native_formulas: dict[str, int] = {}


class _Opened(threading.local):
    """Whether the live native forward level is one that this module opened, and may be shared across planes."""

    ours = False


_opened = _Opened()

# Operations found to have no forward formula; asked once each.
_without_formula: set[Any] = set()


def differentiable(tensor: Tensor) -> bool:
    """Whether the dtype can carry a tangent."""
    return tensor.is_floating_point() or tensor.is_complex()


def native_jvp(level: Any, func: Any, args: tuple, kwargs: dict) -> tuple[Any, Any]:
    """Results and tangents of one operation on the dual plane of `level`. Called in the plane below."""
    return torch_formula(func, args, kwargs, level.primal, level.tangent)


def torch_formula(
    func: Any, args: tuple, kwargs: dict, primal: Callable[[Tensor], Tensor], tangent: Callable[[Tensor], Tensor | None]
) -> tuple[Any, Any]:
    """Results and tangents of one operation, whose operands `primal` and `tangent` take apart.

    Every floating operand gets a tangent, zeros where it has none: an operand without one sends torch's formulas
    through meta kernels, 90-230 us an operation.
    """
    if tls_is_excluded(AUTOGRAD_KEY):
        return _where_torch_derives(torch_formula, func, args, kwargs, primal, tangent)
    name = str(func)
    native_formulas[name] = native_formulas.get(name, 0) + 1
    if func not in _without_formula and (forward_level() < 0 or _opened.ours):
        try:
            if _opened.ours:
                return _forward(func, args, kwargs, primal, tangent, shared=True)
            _opened.ours = True
            try:
                with forward_ad.dual_level():
                    return _forward(func, args, kwargs, primal, tangent, shared=False)
            finally:
                _opened.ours = False
        except NotImplementedError as error:
            if "forward AD" not in str(error):
                raise
            _without_formula.add(func)
    return double_reverse(func, args, kwargs, primal, tangent)


def _forward(func: Any, args: tuple, kwargs: dict, primal: Any, tangent: Any, shared: bool) -> tuple[Any, Any]:
    plane = _highest(args, kwargs, primal, tangent)

    def enter(tensor: Tensor) -> Tensor:
        x, t = primal(tensor), tangent(tensor)
        if not differentiable(x):
            return x
        if plane is not None and not plane.owns(x):
            # Otherwise what is computed on the plane below, too, would have this tangent.
            x = apply_plainly(_Enter, x, plane) if is_grad_enabled() and recorded(x) else plane.adopt(x)
        elif shared:
            # An operand of a lower plane may carry the zero tangent that the plane above gave it.
            x = forward_ad.unpack_dual(x, level=0).primal
        if 0 in x.stride():
            # torch gives the tangent the layout of the primal, and cannot write to an expanded one.
            x = x.contiguous()
        return make_dual(x, torch.zeros_like(x) if t is None else t, level=0)

    below_args, below_kwargs = replace_tensors(enter, args, kwargs)
    out = func(*below_args, **below_kwargs)
    if isinstance(out, Tensor):
        return _leave(out)
    unpacked = [_leave(item) if isinstance(item, Tensor) else (item, None) for item in out]
    primals = [primal for primal, _ in unpacked]
    return type(out)(primals) if type(out) in (list, tuple) else tuple(primals), [tangent for _, tangent in unpacked]


class _Enter(Function):
    """A tensor of a plane below on this one, with its history here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plane: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        return plane.adopt(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple:
        return grad, None


def _leave(out: Tensor) -> tuple[Tensor, Tensor | None]:
    primal, tangent = forward_ad.unpack_dual(out, level=0)
    # A zero without memory cannot be written to.
    return primal, None if tangent is not None and tangent._is_zerotensor() else tangent


def _highest(args: tuple, kwargs: dict, primal: Any, tangent: Any) -> Any:
    """The highest level of the operands, None where they are plain."""
    highest = None
    for tensor in tensors_of(args, kwargs):
        for part in (primal(tensor), tangent(tensor)):
            if isinstance(part, Plane) and (highest is None or part.level.order > highest.order):
                highest = part.level
    return highest


def _where_torch_derives(run: Callable, func: Any, args: tuple, kwargs: dict, primal: Any, tangent: Any) -> Any:
    """A formula outside of the inference mode that is around the level, in which torch would give no tangent."""
    with recording_again():
        return run(func, args, kwargs, lambda x: ordinary(primal(x)), lambda x: ordinary(tangent(x)))


@contextmanager
def recording_again() -> Iterator[None]:
    """Out of inference mode, which may be that of a plane below, for derivatives that torch is to take."""
    recording = is_grad_enabled()
    with torch.inference_mode(False):
        set_grad_enabled(recording)
        yield


def ordinary(tensor: Tensor | None) -> Tensor | None:
    """A tensor that can be kept for a derivative, as one made in inference mode cannot."""
    return tensor.clone() if tensor is not None and tensor.is_inference() else tensor


def double_reverse(
    func: Any, args: tuple, kwargs: dict, primal: Any, tangent: Any, said_slow: Callable[[], None] | None = None
) -> tuple[Any, Any]:
    """Jv as the derivative, in u, of u -> J'u: works wherever the operation can be differentiated twice.

    A user's formula may leave autograd, for NumPy say, so that its J'u does not tell how it depends on u. Where it
    may (`said_slow` is then called), the elements of Jv are found one by one, as the products of v with the rows of J.
    """
    if tls_is_excluded(AUTOGRAD_KEY):
        run = double_reverse if said_slow is None else functools.partial(double_reverse, said_slow=said_slow)
        return _where_torch_derives(run, func, args, kwargs, primal, tangent)
    outer = is_grad_enabled()
    kept = False  # Whether somebody differentiates the result on this plane.
    plane = _highest(args, kwargs, primal, tangent)
    with torch.enable_grad():
        aliases: dict[int, tuple[Tensor, Tensor]] = {}

        def enter(tensor: Tensor) -> Tensor:
            nonlocal kept
            x, t = primal(tensor), tangent(tensor)
            kept = kept or recorded(x) or (t is not None and recorded(t))
            if t is None:
                return x
            if id(tensor) not in aliases:
                # Differentiated on the plane of the highest operand alone: the planes below keep their history of x.
                alias = x.view_as(x) if plane is None or plane.owns(x) else plane.adopt(x)
                aliases[id(tensor)] = (alias if recorded(alias) else alias.requires_grad_(), t)
            return aliases[id(tensor)][0]

        below_args, below_kwargs = replace_tensors(enter, args, kwargs)
        kept = kept and outer
        inputs = [alias for alias, _ in aliases.values()]
        tangents = [t for _, t in aliases.values()]
        out = func(*below_args, **below_kwargs)
        leaves, spec = flatten(out)
        live = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and recorded(leaf)]
        probes = [torch.zeros_like(leaves[i]).requires_grad_() for i in live]
        if not live:
            return out, None
        with pin_grad_mode(outer):
            pulled = torch.autograd.grad(
                [leaves[i] for i in live], inputs, probes, create_graph=True, allow_unused=True
            )
            used = [i for i, g in enumerate(pulled) if g is not None and recorded(g)]

            def push(positions: list[int]) -> tuple:
                return torch.autograd.grad(
                    [pulled[i] for i in positions],
                    probes,
                    [tangents[i] for i in positions],
                    create_graph=kept,
                    retain_graph=True,
                    allow_unused=True,
                )

            if said_slow is None:
                pushed = push(used)
            else:
                parts = {i: push([i]) for i in used}
                parts = {i: part for i, part in parts.items() if any(t is not None for t in part)}
                hidden = [i for i, g in enumerate(pulled) if g is not None and i not in parts]
                if hidden:
                    said_slow()
                    parts[-1] = tuple(
                        [
                            _by_rows(leaves[i], [inputs[k] for k in hidden], [tangents[k] for k in hidden], kept)
                            for i in live
                        ]
                    )
                pushed = [_sum(column) for column in zip(*parts.values())]
    found: list[Tensor | None] = [None] * len(leaves)
    for i, pushed_tangent in zip(live, pushed):
        found[i] = pushed_tangent
    if not kept:
        leaves = [detached(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    out = unflatten(leaves, spec)
    return out, (found[0] if isinstance(out, Tensor) else found)


def _by_rows(out: Tensor, inputs: list[Tensor], tangents: list[Tensor], kept: bool) -> Tensor:
    """Jv from the rows of J, one pull for each number in the result."""
    numbers = []
    for unit in (1, 1j) if out.is_complex() else (1,):
        found = []
        for k in range(out.numel()):
            row = torch.zeros_like(out).reshape(-1).index_fill(0, torch.tensor([k], device=out.device), unit)
            pulled = torch.autograd.grad(
                out, inputs, row.view(out.shape), retain_graph=True, create_graph=kept, allow_unused=True
            )
            products = [
                (g.conj() * t).real if g.is_complex() else g * t for g, t in zip(pulled, tangents) if g is not None
            ]
            found.append(sum(product.sum() for product in products))
        numbers.append(torch.stack(found) if found else torch.zeros_like(out).reshape(-1).real)
    return (torch.complex(*numbers) if out.is_complex() else numbers[0]).view(out.shape)


def _sum(parts: tuple) -> Tensor | None:
    total = None
    for part in parts:
        total = part if total is None else total if part is None else total + part
    return total
