"""torch's own control-flow functions, called inside a transformed function: served by ours.

torch's compile what they are given, which planes cannot go through.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from lanewise._control.functional import operators, scans
from lanewise._core.level import current_level, route_name
from lanewise._torch_compat import ORDER_KEY, higher_order_modules, serve_higher_order, tls_is_included


def _while_loop(cond_fn: Callable, body_fn: Callable, carried_inputs: tuple) -> Any:
    def body(state: tuple) -> tuple:
        out = body_fn(*state)
        return tuple(out) if isinstance(out, (tuple, list)) else (out,)

    return operators.while_loop(lambda state: cond_fn(*state), body, tuple(carried_inputs))


def _scan(combine_fn: Callable, init: Any, xs: Any, *, dim: int = 0, reverse: bool = False) -> Any:
    if dim == 0:
        return scans.scan(combine_fn, init, xs, reverse=reverse)
    leaves, spec = scans.flatten(xs)
    rows = scans.unflatten([leaf.movedim(dim, 0) for leaf in leaves], spec)
    return scans.scan(combine_fn, init, rows, reverse=reverse)


def _associative_scan(
    combine_fn: Callable, xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
) -> Any:
    return scans.associative_scan(combine_fn, xs, reverse, dim)


def _map(f: Callable, xs: Any, *args: Any) -> Any:
    return scans.map(lambda x: f(x, *args), xs)


def _routed(own: Callable, theirs: Callable) -> Callable:
    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        outside = current_level() is None and not tls_is_included(ORDER_KEY)
        return (theirs if outside else own)(*args, **kwargs)

    return call


def _while_of_graphs(cond_fn: Callable, body_fn: Callable, carried: tuple, captured: tuple) -> tuple:
    return _while_loop(lambda *state: cond_fn(*state, *captured), lambda *state: body_fn(*state, *captured), carried)


# In a `grad` that is inside no other transform, `torch.cond` is torch's own. The graphs that it makes come here.
serve_higher_order(torch.ops.higher_order.cond, ORDER_KEY, operators.cond)
serve_higher_order(torch.ops.higher_order.while_loop, ORDER_KEY, _while_of_graphs)
route_name("cond", _routed(operators.cond, torch.cond))
route_name("while_loop", _routed(_while_loop, torch.while_loop))  # type: ignore[attr-defined]
for _name, _own in (
    ("cond", operators.cond),
    ("while_loop", _while_loop),
    ("scan", _scan),
    ("associative_scan", _associative_scan),
    ("map", _map),
):
    for _module in higher_order_modules(_name):
        setattr(_module, _name, _routed(_own, getattr(_module, _name)))
