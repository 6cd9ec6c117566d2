"""Batching rules that users wrote for torch's own vmap: of a `Function`, and of a custom operator."""

from typing import Any, NamedTuple

from torch import Tensor

from lanewise._core.draws.chunk_draws import own_draws
from lanewise._torch_compat import user_vmap_rule
from lanewise.errors import TransformError, at_user_line


class VmapInfo(NamedTuple):
    """What a user's rule is told."""

    batch_size: int
    randomness: str


def wrap_by_out_dims(level: Any, name: str, result: Any) -> tuple[tuple, bool]:
    """Outputs of a user's rule on the plane of `level`, and whether it is a single one."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise TransformError(
            at_user_line(
                f"vmap: {name}: Expected the vmap staticmethod to have two returns, an output and out_dims with "
                f"pytree structure compatible with the output. Got {type(result).__name__}",
                "return out, 0",
            )
        )
    out, dims = result
    single = not isinstance(out, (tuple, list))
    outs = (out,) if single else tuple(out)
    every = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,) * len(outs)
    if len(every) != len(outs) or not all(dim is None or isinstance(dim, int) for dim in every):
        raise TransformError(
            at_user_line(
                f"vmap: {name}: the vmap staticmethod returned an incompatible (output, out_dims) tuple. Expected "
                f"out_dims={dims} to be compatible with the structure of output, {len(outs)} in all",
                "return (a, b), (0, 0)",
            )
        )

    def wrap(tensor: Any, dim: int | None) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        return level.adopt(tensor) if dim is None else level.wrap(level.below(tensor.movedim, dim, 0))

    return tuple([wrap(tensor, dim) for tensor, dim in zip(outs, every, strict=True)]), single


def by_user_rule(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """A custom operator by the rule given to `register_vmap`; NotImplemented where there is none, or no lanes."""
    rule = user_vmap_rule(func)
    if rule is None or not any(level.mapped(arg) for arg in (*args, *kwargs.values())):
        return NotImplemented
    in_dims = tuple([0 if level.mapped(arg) else None for arg in args])
    below = [level.physical(arg) if isinstance(arg, Tensor) else arg for arg in args]
    below_kwargs = {key: level.physical(arg) if isinstance(arg, Tensor) else arg for key, arg in kwargs.items()}
    info = VmapInfo(level.size, level.randomness)
    with own_draws(level, func.name()):
        result = rule(info, in_dims, *below, **below_kwargs)
    outs, single = wrap_by_out_dims(level, func.name(), result)
    return outs[0] if single else outs
