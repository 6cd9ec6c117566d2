"""What the transforms share in reading arguments: `argnums`, `has_aux`, and the leaves to differentiate."""

from typing import Any

from torch import Tensor

from lanewise._core.trees import flatten, leaf_names
from lanewise.errors import ArgumentError, TransformError, at_user_line


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
