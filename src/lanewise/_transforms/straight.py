"""Functions whose lanes all go one way: from their third call on, they run on no plane, but on plain tensors.

None of their operations passes through a tensor of lanes and the dispatcher, which takes several times as long as a
small kernel. There are two kinds. Functions of cheap elementwise operations on numbers and vectors are written as for
lanes that part (predication.py): such an operation is called as it stands. Others compute with tensors
(_control/abreast). A function that is called but once or twice is not worth reading.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, strided

from lanewise._torch_compat import is_grad_enabled
from lanewise._transforms.parting import runner

_FIRST = 2
# Instead of a number of calls: those that are tried as tensors only, and those that do not run like that.
_OF_TENSORS, _NEVER = -1, -2
# How often each function has been called, by its code and whether autograd records: then, some operations are declined.
_calls: dict[Any, int] = {}
# So many are remembered.
_MOST = 10_000


def run_straight(code: Any, func: Callable, args: tuple, in_dims: Sequence[int | None]) -> Any:
    """The result of a `vmap` over dim 0 of arguments.

    NotImplemented where this call takes a plane, None where all calls do.
    """
    code = code, is_grad_enabled()
    calls = _calls.get(code, 0)
    if calls == _NEVER:
        return None
    small = calls != _OF_TENSORS
    for arg, dim in zip(args, in_dims):
        if isinstance(arg, Tensor):
            if arg.layout is not strided:
                return NotImplemented
            small = small and arg.dim() < 3  # a number or a vector of each lane, or a matrix that they share
        elif dim is not None:
            return NotImplemented
    if 0 <= calls < _FIRST:
        if len(_calls) >= _MOST:
            _calls.clear()
        _calls[code] = calls + 1
        return NotImplemented
    if small:
        out = runner.straight(func, args, in_dims)
        if out is not None:
            return out
        _calls[code] = _OF_TENSORS
    out = runner.abreast(func, args, in_dims)
    if out is None:
        _calls[code] = _NEVER
    return out
