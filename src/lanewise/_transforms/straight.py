"""Functions of cheap elementwise operations whose lanes all go one way: from their third call on, they run on no plane.

The operations are those of the function's syntax, on tensors with all lanes (predication.py writes it for them): none
of them passes through Python code of this library, which takes several times as long as a small kernel. A function that
is called but once or twice is not worth reading.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, strided

from lanewise._transforms.parting import runner

_FIRST = 2
_NEVER = -1
# How often each function has been called, by its code; `_NEVER` for those that do not run like that.
_calls: dict[Any, int] = {}
# So many are remembered.
_MOST = 10_000


def run_straight(code: Any, func: Callable, args: tuple, in_dims: Sequence[int | None]) -> Any:
    """The result of a `vmap` over dim 0 of arguments.

    NotImplemented where this call takes a plane, None where all calls do.
    """
    for arg, dim in zip(args, in_dims):
        if isinstance(arg, Tensor):
            if arg.dim() > 2 or arg.layout is not strided:
                return NotImplemented  # no number or vector of each lane
        elif dim is not None:
            return NotImplemented
    calls = _calls.get(code, 0)
    if calls == _NEVER:
        return None
    if calls < _FIRST:
        if len(_calls) >= _MOST:
            _calls.clear()
        _calls[code] = calls + 1
        return NotImplemented
    out = runner.straight(func, args, in_dims)
    if out is None:
        _calls[code] = _NEVER
    return out
