"""Backward passes, and what the formulas of operations may ask of the one that runs."""

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lanewise._torch_compat import AccumulateGrad, enter_engine_plainly, will_execute


class _Asked(threading.local):
    """The tensors that the innermost backward pass of this thread is to give gradients of, as far as that is known."""

    tensors: Sequence[Any] = ()


_asked = _Asked()


def run_backward(
    outputs: Sequence[Any],
    cotangents: Sequence[Any],
    retain_graph: Any,
    create_graph: bool,
    inputs: Sequence[Any],
    *args: Any,
    **kwargs: Any,
) -> tuple:
    """torch's engine: what torch.autograd.grad and backward call after checking their arguments."""
    before = _asked.tensors
    _asked.tensors = inputs
    try:
        return enter_engine_plainly(outputs, cotangents, retain_graph, create_graph, inputs, *args, **kwargs)
    finally:
        _asked.tensors = before


def engine_goes_on(node: Any, position: int) -> bool:
    """Whether the running backward pass needs the gradient of an operand of the operation that a node stands for.

    Those of a Function's `needs_input_grad` are all that need one in some pass.
    """
    following = node.next_functions[position][0]
    if following is None:
        return False
    if type(following) is AccumulateGrad and _is_asked(following.variable):
        return True
    try:
        return will_execute(following)
    except RuntimeError:
        # A leaf whose gradient was asked for, of a pass that runs in another thread: torch makes an error of that,
        # which takes it 12 us.
        return True


def _is_asked(leaf: Tensor) -> bool:
    for tensor in _asked.tensors:
        if tensor is leaf:
            return True
    return False
