"""Gradients that are recorded on the plane below the lanes: what their tests share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise import grad, grad_and_value, value_and_grad, vmap
from lanewise._core.batch import BatchTensor
from lanewise._core.plane import recorded
from lanewise._core.short.shared import _below, _spread, _unrecorded, _without, _without_gradients, with_wrappers


def forget() -> None:
    """Forget what is known of functions, as where none has been called yet."""
    kinds = (_without, _below, _spread, _unrecorded)
    for known in (with_wrappers, _without_gradients, *(known for kind in kinds for known in kind.values())):
        known.clear()


X = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.7, -1.1], [2.0, 0.1, 0.2], [-0.4, 1.3, 0.9]], dtype=torch.float64)
Y = torch.tensor([[0.2, 1.0], [-0.5, 0.4], [1.5, -0.3], [0.8, 0.6]], dtype=torch.float64)
W = torch.tensor([[0.5, -1.5, 2.0], [0.1, 0.2, -0.7]], dtype=torch.float64)


def energy(x: Tensor) -> Tensor:
    d = x[:, None] - x[None]
    return ((d * d).exp() * 0.1).sum() + torch.tanh(W @ x).sum() + x.prod()


def is_below(x: Any) -> bool:
    """Whether what is differentiated with respect to `x` is recorded below."""
    return type(x) is BatchTensor and not recorded(x) and x.value.requires_grad


def below_in_calls(call: Callable, f: Callable, *args: Any) -> list[bool]:
    """For three calls of `vmap(call(f))`, whether the gradient was recorded below."""
    found = []

    def look(x: Any, *rest: Any) -> Any:
        found[-1] = found[-1] or is_below(x)
        return f(x, *rest)

    mapped = vmap(call(look))
    for _ in range(3):
        found.append(False)
        mapped(*args)
    return found


def by_loop(f: Callable, *args: Tensor) -> Any:
    results = [f(*row) for row in zip(*args)]
    if isinstance(results[0], Tensor):
        return torch.stack(results)
    return tuple(torch.stack(list(column)) for column in zip(*results))


def same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected)
    for ours, theirs in zip(
        (got,) if isinstance(got, Tensor) else got, (expected,) if isinstance(expected, Tensor) else expected
    ):
        assert ours.requires_grad == theirs.requires_grad


KINDS: dict[str, Callable] = {
    "grad": grad,
    "grad_and_value": grad_and_value,
    "value_and_grad": value_and_grad,
    "of one of two": lambda f: lambda x, *rest: grad(f)(x * 2, *rest) + x,
}
