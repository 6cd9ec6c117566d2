"""Scripted and traced code inside a transform: operation by operation, each on its plane.

What torch.jit makes of a graph that has run before takes derivatives itself: it detaches its operands, which cuts the
history of every plane and drops tangents. On wrappers, the graph runs as it was written.
"""

from collections.abc import Callable
from typing import Any

from lanewise._core.level import standing
from lanewise._core.plane import Plane
from lanewise._core.trees import flatten
from lanewise._torch_compat import ScriptFunction, ScriptMethod, function_of_graph, unoptimized

# Graphs as functions that nothing has been made of, by the names of the code; they take the module first, if there is.
_written: dict[Any, Any] = {}


_call_function = ScriptFunction.__call__


def _bound(schema: Any, leading: int, args: tuple, kwargs: dict) -> list[Any]:
    """The arguments in order after so many `leading` ones (a method's module), defaults filled in."""
    wanted = schema.arguments[leading:]
    given = list(args)
    for arg in wanted[len(args) :]:
        if arg.name not in kwargs and not arg.has_default_value():
            raise TypeError(f"{schema.name}() is missing a value for the argument {arg.name!r}")
        given.append(kwargs.get(arg.name, arg.default_value))
    if len(args) > len(wanted) or not kwargs.keys() <= {arg.name for arg in wanted[len(args) :]}:
        raise TypeError(f"{schema.name}() takes the arguments {[arg.name for arg in wanted]}")
    return given


def _lead(kind: type, owner: Callable[[Any], tuple]) -> None:
    plain = kind.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if standing.here is None or not any(isinstance(leaf, Plane) for leaf in flatten((args, kwargs))[0]):
            return plain(self, *args, **kwargs)
        name, module = owner(self)
        run = _written.get(name)
        if run is None:
            run = _written[name] = function_of_graph(self.inlined_graph)
        with unoptimized():
            return _call_function(run, *module, *_bound(self.schema, len(module), args, kwargs))

    kind.__call__ = call  # type: ignore[method-assign]


_lead(ScriptFunction, lambda function: (function.qualified_name, ()))
_lead(ScriptMethod, lambda method: ((method.owner._type().qualified_name(), method.name), (method.owner,)))
