"""What the transforms share in reading arguments: the call as written, `argnums`, `has_aux`, the leaves."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lanewise._core.trees import flatten, leaf_names
from lanewise.errors import ArgumentError, TransformError, at_user_line


def function_name(func: Any) -> str:
    """A function as messages name it."""
    if isinstance(func, functools.partial):
        return f"functools.partial({function_name(func.func)}, ...)"
    name = getattr(func, "__name__", None)
    if name is None:
        return type(func).__name__
    return "f" if name == "<lambda>" else name


class Call:
    """One call of a transformed function, for messages: `vmap(loss, in_dims=(0, None))(x, y)`.

    Options that stand at their default, 0 or None, are not shown.
    """

    __slots__ = ("api", "func", "args", "kwargs", "options")

    def __init__(self, api: str, func: Callable, args: tuple, kwargs: dict, options: dict[str, Any]) -> None:
        self.api = api
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.options = options

    @property
    def name(self) -> str:
        """The function's name."""
        return function_name(self.func)

    def __str__(self) -> str:
        options = "".join(
            f", {name}={value!r}" for name, value in self.options.items() if value is not None and value != 0
        )
        return f"{self.api}({self.name}{options})({self.arguments_text()})"

    def arguments_text(self) -> str:
        """The arguments by name, as in a call."""
        keywords = [f"{name}={name}" for name in self.kwargs]
        return ", ".join([*self.argument_names(), *keywords])

    def parameters(self) -> tuple[list[str], str | None]:
        """Names of the parameters that the positional arguments go to, and of `*args` if some of them go there."""
        try:
            declared = list(inspect.signature(self.func).parameters.values())
        except (TypeError, ValueError):
            return [], "args"
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [parameter.name for parameter in declared if parameter.kind in kinds][: len(self.args)]
        rest = [parameter.name for parameter in declared if parameter.kind is inspect.Parameter.VAR_POSITIONAL]
        return names, (rest[0] if rest else "args") if len(names) < len(self.args) else None

    def argument_names(self) -> list[str]:
        """A name for each positional argument: the parameter's, or `args[2]`."""
        names, rest = self.parameters()
        return [*names, *[f"{rest}[{i}]" for i in range(len(self.args) - len(names))]]

    def accepts(self, name: str) -> bool:
        """Whether the function has a parameter of that name (True where it does not tell)."""
        try:
            return name in inspect.signature(self.func).parameters
        except (TypeError, ValueError):
            return False


def refuse_peer(api: str) -> TransformError:
    """The error for a call inside one of torch.func's own transforms."""
    return TransformError(
        at_user_line(
            f"{api}: called inside a function that torch.func transforms. Its tensors belong to another engine, and "
            "the two cannot be nested in this order",
            "from lanewise import vmap, grad, jvp  # for the outer transform too",
        )
    )


def check_argnums(argnums: Any, count: int) -> int | tuple[int, ...]:
    """`argnums` as non-negative positions among `count` arguments."""
    if isinstance(argnums, bool) or not isinstance(argnums, (int, tuple)):
        raise TransformError(
            at_user_line(f"argnums must be int or Tuple[int, ...], got: {type(argnums)}", "grad(f, argnums=(0, 1))")
        )
    if isinstance(argnums, int):
        return _check_argnum(argnums, count)
    if not argnums:
        raise TransformError(at_user_line("argnums must be non-empty, got: ()", "grad(f, argnums=0)"))
    for argnum in argnums:
        if isinstance(argnum, bool) or not isinstance(argnum, int):
            raise TransformError(
                at_user_line(f"argnums must be int or Tuple[int, ...], got: {argnums}", "grad(f, argnums=(0, 1))")
            )
    positions = tuple(_check_argnum(argnum, count) for argnum in argnums)
    if len(set(positions)) != len(positions):
        raise TransformError(
            at_user_line(f"argnums elements must be unique, got: {argnums}", "grad(f, argnums=(0, 1))")
        )
    return positions


def _check_argnum(argnum: int, count: int) -> int:
    if not -count <= argnum < count:
        raise TransformError(
            at_user_line(
                f"Got argnum={argnum}, but only {count} positional inputs: positions go from {-count} to {count - 1}. "
                "Arguments passed by keyword cannot be differentiated",
                "grad(f, argnums=0)(x, y)  # pass the argument by position",
            )
        )
    return argnum % count


def select(args: tuple, argnums: int | tuple[int, ...]) -> Any:
    """The argument or the tuple of arguments that `argnums` names."""
    return args[argnums] if isinstance(argnums, int) else tuple(args[position] for position in argnums)


def replace(args: tuple, argnums: int | tuple[int, ...], new: Any) -> tuple:
    """`args` with the selected ones replaced."""
    replaced = list(args)
    if isinstance(argnums, int):
        replaced[argnums] = new
    else:
        for position, value in zip(argnums, new, strict=True):
            replaced[position] = value
    return tuple(replaced)


def check_tensors(leaves: list, tree: Any, api: str, root: str) -> None:
    """Raise unless all leaves are tensors, naming the one that is not."""
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            name = leaf_names(tree, root)[position]
            raise ArgumentError(
                at_user_line(
                    f"{api}: Thing passed to transform API must be Tensor, got {type(leaf)} for {name}",
                    f"torch.tensor({leaf!r})"
                    if isinstance(leaf, (int, float))
                    else "pass it by keyword or close over it",
                )
            )


def check_differentiable(api: str, leaf: Tensor, tree: Any, position: int, must: str = "") -> None:
    """Raise unless the leaf has a floating point or complex dtype."""
    if leaf.is_floating_point() or leaf.is_complex():
        return
    if must:
        name = leaf_names(tree, "output")[position]
        raise TransformError(
            at_user_line(
                f"{api}: {must} floating-point or complex Tensors, got {leaf.dtype} at {name} {list(leaf.shape)}",
                "return y.float()  # or return integer results as aux, with has_aux=True",
            )
        )
    name = leaf_names(tree, "args")[position]
    raise TransformError(
        at_user_line(
            f"{api}: only Tensors of floating point dtype can require gradients, got {leaf.dtype} for {name} "
            f"{list(leaf.shape)}",
            "x.float()  # or leave the argument out of argnums",
        )
    )


def cotangents_mismatch(got: Any, wanted: Any) -> TransformError:
    """The error for cotangents of another structure than the output."""
    return TransformError(
        at_user_line(
            "vjp_fn(cotangents): Expected pytree structure of cotangents to be the same as pytree structure of outputs "
            f"to the function. cotangents: {got}, primal output: {wanted}",
            "vjp_fn((ct0, ct1))  # one argument: a tuple where f returns a tuple",
        )
    )


def cotangent_mismatch(cotangent: Any, output: Tensor, value: Any, position: int) -> TransformError:
    """The error for one cotangent that does not fit its output."""
    name = leaf_names(value, "output")[position]
    got = f"of shape {list(cotangent.shape)}" if isinstance(cotangent, Tensor) else f"of type {type(cotangent)}"
    return TransformError(
        at_user_line(
            f"vjp_fn(cotangents): Mismatch in shape: grad_output[{position}] is {got}, but {name} has shape "
            f"{list(output.shape)}",
            f"vjp_fn(torch.ones({list(output.shape)}))",
        )
    )


def split_aux(api: str, out: Any, has_aux: bool) -> tuple[Any, Any]:
    """The output and its auxiliary part."""
    if not has_aux:
        return out, None
    if not isinstance(out, tuple) or len(out) != 2:
        got = f"a tuple of {len(out)}" if isinstance(out, tuple) else str(type(out))
        raise TransformError(
            at_user_line(
                f"{api}: output of function f should be a tuple: (output, aux) if has_aux is True, got {got}",
                "return loss, aux",
            )
        )
    return out


def tensor_leaves(tree: Any) -> list[Tensor]:
    """The tensors of a tree."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]
