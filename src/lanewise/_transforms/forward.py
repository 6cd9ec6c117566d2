"""`jvp` and `linearize`: tangents carried forward on a dual plane."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.dual import DualLevel, DualTensor
from lanewise._core.plane import sync
from lanewise._core.trees import flatten, unflatten
from lanewise._transforms.arguments import split_aux
from lanewise._transforms.reverse import check_outputs
from lanewise.errors import ArgumentError, TransformError, at_user_line


def jvp(func: Callable, primals: tuple, tangents: tuple, *, strict: bool = False, has_aux: bool = False) -> Any:
    """The value of `func` at `primals` and its directional derivative along `tangents`.

    >>> import torch
    >>> jvp(torch.sin, (torch.zeros(2),), (torch.ones(2),))
    (tensor([0., 0.]), tensor([1., 1.]))
    """
    leaves, tangent_leaves, spec = check_primals("jvp", primals, tangents)
    with DualLevel() as level:
        duals = [level.wrap(x, t) for x, t in zip(leaves, tangent_leaves, strict=True)]
        out = func(*unflatten(duals, spec))
        value, aux = split_aux("jvp", out, has_aux)
        outputs, out_spec = flatten(value)
        check_outputs("jvp", value, outputs)
        pairs = [level.below(leave_leaf, level, leaf, strict) for leaf in outputs]
        aux = level.below(drop_tangents, level, aux) if has_aux else None
    result = unflatten([p for p, _ in pairs], out_spec)
    pushed = unflatten([t for _, t in pairs], out_spec)
    return (result, pushed, aux) if has_aux else (result, pushed)


def check_primals(api: str, primals: Any, tangents: Any) -> tuple[list[Tensor], list[Tensor], Any]:
    """Leaves of primals and tangents and their structure; raises where they do not match."""
    if not isinstance(primals, tuple):
        raise TransformError(
            at_user_line(
                f"{api}: Expected primals to be a tuple. E.g. it should be valid to call f(*primals). "
                f"Got {type(primals)}",
                f"{api}(f, (x,), (t,))",
            )
        )
    leaves, spec = flatten(primals)
    tangent_leaves, tangent_spec = flatten(tangents)
    if spec != tangent_spec:
        raise TransformError(
            at_user_line(
                f"{api}: Expected primals and tangents to have the same python structure. For example, if primals is a "
                f"tuple of 3 tensors, tangents also must be. Got primals {spec} and tangents {tangent_spec}"
            )
        )
    for position, (x, t) in enumerate(zip(leaves, tangent_leaves, strict=True)):
        if not isinstance(x, Tensor) or not isinstance(t, Tensor):
            raise TransformError(
                at_user_line(
                    f"{api}: Expected primals to only contain Tensors, got {type(x)} and {type(t)} at {position}"
                )
            )
        if not (x.is_floating_point() or x.is_complex()):
            raise ArgumentError(
                at_user_line(f"{api}: Expected primal to be floating point or complex, but got: {x.dtype}", "x.float()")
            )
        if x.shape != t.shape:
            raise TransformError(
                at_user_line(
                    f"{api}: Trying to set a forward gradient that has a different size than that of the original "
                    f"Tensor, this is not supported. Tensor is of size {list(x.shape)} while the given forward gradient "
                    f"is of size {list(t.shape)} (primal {position})"
                )
            )
    return leaves, tangent_leaves, spec


def leave_leaf(level: DualLevel, leaf: Tensor, strict: bool = False) -> tuple[Tensor, Tensor]:
    """Primal and tangent of a result, on the plane below."""
    if type(leaf) is DualTensor and leaf.level is level:
        sync(leaf)
        if leaf.tangent is not None:
            return leaf.value, leaf.tangent
        leaf = leaf.value
    if strict:
        raise TransformError(
            at_user_line(
                "jvp(f, primals, tangents, strict=True): The output of f is independent of the inputs. This is not "
                "allowed with strict=True."
            )
        )
    return leaf, torch.zeros_like(leaf)


def drop_tangents(level: DualLevel, tree: Any) -> Any:
    """`tree` on the plane below, without tangents."""
    leaves, spec = flatten(tree)
    return unflatten([level.primal(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
