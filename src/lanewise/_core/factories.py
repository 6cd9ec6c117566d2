"""Tensors made inside a transformed function: wrapped on the innermost plane, so that its values may be written to them.

The kernels sit on a dispatch key that is switched on while a level is open, ahead of autograd. A factory call from
inside a backend kernel must stay plain; there the view-tracking key is excluded, which is how the two are told apart.
"""

from typing import Any

import torch
from torch._ops import OpOverload

from lanewise._core.level import top_level
from lanewise._core.plane import Plane, tensors_of
from lanewise._torch_compat import (
    ADINPLACE_OR_VIEW_KEY,
    FACTORY_KEY_NAME,
    FACTORY_KEY_SET,
    ExcludeDispatchKeyGuard,
    tls_is_excluded,
)

_hooked: set[OpOverload] = set()
_fallthrough = torch.library.Library("_", "IMPL")
_fallthrough.fallback(torch.library.fallthrough_kernel, FACTORY_KEY_NAME)
_kernels = torch.library.Library("aten", "IMPL")


def adopt_results_of(*ops: OpOverload, inside_binding: bool = False) -> None:
    """Route these overloads through the innermost level while one is open.

    `inside_binding` marks an operation that the Python binding itself calls with view tracking switched off
    (`torch.tensor` does so with `lift_fresh`).
    """
    for op in ops:
        if op in _hooked:
            raise ValueError(f"{op} is routed already")
        _hooked.add(op)
        _kernels.impl(op.name().removeprefix("aten::"), _kernel(op, inside_binding), FACTORY_KEY_NAME)


def _kernel(op: OpOverload, inside_binding: bool) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        with ExcludeDispatchKeyGuard(FACTORY_KEY_SET):
            level = top_level()
            if level is None:
                return op(*args, **kwargs)
            for operand in tensors_of(args, kwargs):
                if isinstance(operand, Plane):
                    return op(*args, **kwargs)
            return level.factory(op, args, kwargs)

    return made
