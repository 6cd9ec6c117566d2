"""Tangents by torch's own formulas: native forward-mode AD for one operation, or two reverse passes where it has none."""

import threading
from typing import Any

import torch
from torch import Tensor

from lanewise._core.plane import replace_tensors
from lanewise._core.trees import flatten, unflatten
from lanewise._torch_compat import forward_ad, forward_level, is_grad_enabled


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
    """Results and tangents of one operation. Called in the plane below.

    Every floating operand gets a tangent, zeros where it has none: an operand without one sends torch's formulas
    through meta kernels, 90-230 us an operation.
    """
    if func not in _without_formula and (forward_level() < 0 or _opened.ours):
        try:
            if _opened.ours:
                return _forward(level, func, args, kwargs, shared=True)
            _opened.ours = True
            try:
                with forward_ad.dual_level():
                    return _forward(level, func, args, kwargs, shared=False)
            finally:
                _opened.ours = False
        except NotImplementedError as error:
            if "forward AD" not in str(error):
                raise
            _without_formula.add(func)
    return _double_reverse(level, func, args, kwargs)


def _forward(level: Any, func: Any, args: tuple, kwargs: dict, shared: bool) -> tuple[Any, Any]:
    def enter(tensor: Tensor) -> Tensor:
        primal, tangent = level.primal(tensor), level.tangent(tensor)
        if not differentiable(primal):
            return primal
        if shared:
            # An operand of a lower plane may carry the zero tangent that the plane above gave it.
            primal = forward_ad.unpack_dual(primal, level=0).primal
        return forward_ad.make_dual(primal, torch.zeros_like(primal) if tangent is None else tangent, level=0)

    below_args, below_kwargs = replace_tensors(enter, args, kwargs)
    out = func(*below_args, **below_kwargs)
    if isinstance(out, Tensor):
        return tuple(forward_ad.unpack_dual(out, level=0))
    unpacked = [forward_ad.unpack_dual(item, level=0) if isinstance(item, Tensor) else (item, None) for item in out]
    primals = [primal for primal, _ in unpacked]
    return type(out)(primals) if type(out) in (list, tuple) else tuple(primals), [tangent for _, tangent in unpacked]


def _double_reverse(level: Any, func: Any, args: tuple, kwargs: dict) -> tuple[Any, Any]:
    """Jv as the derivative, in u, of u -> J'u: works wherever the operation can be differentiated twice."""
    outer = is_grad_enabled()
    with torch.enable_grad():
        aliases: dict[int, tuple[Tensor, Tensor]] = {}

        def enter(tensor: Tensor) -> Tensor:
            primal, tangent = level.primal(tensor), level.tangent(tensor)
            if tangent is None:
                return primal
            if id(tensor) not in aliases:
                alias = primal.view_as(primal)
                aliases[id(tensor)] = (alias if alias.requires_grad else alias.requires_grad_(), tangent)
            return aliases[id(tensor)][0]

        below_args, below_kwargs = replace_tensors(enter, args, kwargs)
        inputs = [alias for alias, _ in aliases.values()]
        tangents = [tangent for _, tangent in aliases.values()]
        out = func(*below_args, **below_kwargs)
        leaves, spec = flatten(out)
        live = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        probes = [torch.zeros_like(leaves[i]).requires_grad_() for i in live]
        pulled = torch.autograd.grad([leaves[i] for i in live], inputs, probes, create_graph=True, allow_unused=True)
        used = [i for i, g in enumerate(pulled) if g is not None and g.requires_grad]
        pushed = torch.autograd.grad(
            [pulled[i] for i in used], probes, [tangents[i] for i in used], create_graph=outer, allow_unused=True
        )
    found: list[Tensor | None] = [None] * len(leaves)
    for i, tangent in zip(live, pushed, strict=True):
        found[i] = tangent
    if not outer:
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    out = unflatten(leaves, spec)
    return out, (found[0] if isinstance(out, Tensor) else found)
