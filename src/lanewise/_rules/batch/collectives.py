"""Collective operations of `torch.distributed`: one for all lanes, with tensors `[B, *S]` in place of `[*S]`.

All processes must have as many lanes, and come to the operation with all of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.again.journal import keep
from lanewise._core.batch import BatchLevel, captured_write
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.plane import lift, map_tensors
from lanewise._rules.batch.families import batch_rule, lane_rule, refuse
from lanewise._torch_compat import OpOverload
from lanewise.errors import TransformError, at_user_line

c10d = torch.ops.c10d


def _check_all_here(level: BatchLevel, op: OpOverload) -> None:
    if isinstance(level, LaneLevel) and level.lanes is not level.root:
        raise TransformError(
            at_user_line(
                f"vmap: {op}: some lanes only have come here: other processes would wait for the others",
                "dist.all_reduce(x)  # outside branches on lane values",
            )
        )


def _whole(op: OpOverload) -> None:
    """A collective that does the same to each element, or none to any."""
    names = [arg.name for arg in op._schema.arguments]
    written = [k for k, name in enumerate(names) if name.startswith("output") or name == "tensors"]
    if op is c10d.send.default:
        written = []

    @lane_rule(op, raw=True)
    def run(level: BatchLevel, *args: Any, **kwargs: Any) -> Any:
        """tensors [*S] in lists -> the same of [B, *S], written in place"""
        _check_all_here(level, op)
        copies: list[tuple[Tensor, Tensor]] = []

        def enter(tensor: Tensor, writes: bool) -> Tensor:
            if writes and not level.owns(tensor):
                raise captured_write(op, "tensors", tensor)
            if writes:
                lift(tensor)  # type: ignore[arg-type]
                if level.journal is not None:
                    keep(level, level.physical(tensor), tensor.home)  # type: ignore[attr-defined]
            value = level.expanded(tensor)
            if value.is_contiguous():
                return value
            whole = level.below(torch.clone, value).contiguous()
            if writes:
                copies.append((value, whole))
            return whole

        below = [map_tensors(lambda t, k=k: enter(t, k in written), arg) for k, arg in enumerate(args)]
        out = level.below(lambda: op(*below, **kwargs))
        work = out[1] if isinstance(out, tuple) else out
        if copies:
            work.wait()
            for value, whole in copies:
                level.below(value.copy_, whole)
        return (args[0], work) if isinstance(out, tuple) else work


if torch.distributed.is_available():
    for _op in (
        c10d.allgather_.default,
        c10d.allreduce_.default,
        c10d.allreduce_coalesced_.default,
        c10d.alltoall_.default,
        c10d.broadcast_.default,
        c10d.gather_.default,
        c10d.recv_.default,
        c10d.reduce_.default,
        c10d.reduce_scatter_.default,
        c10d.scatter_.default,
        c10d.send.default,
    ):
        _whole(_op)

    for _op in (
        c10d._allgather_base_.default,
        c10d._reduce_scatter_base_.default,
        c10d.allgather_into_tensor_coalesced_.default,
        c10d.alltoall_base_.default,
        c10d.reduce_scatter_tensor_coalesced_.default,
    ):
        refuse(
            _op,
            f"vmap: {_op}: parts of all processes lie one after the other in one tensor, behind the lanes",
            "dist.all_gather(parts, x)  # a list of tensors, one for each process",
        )

    # Those that return their results.
    functional = torch.ops._c10d_functional

    def _returning(op: OpOverload) -> Callable[[Callable], Callable]:
        """A rule `rule(lanes, *args)` with every tensor as `[B, *S]`.

        Results are waited for at once: torch knows of them by their memory, and views and copies of it are made here.
        """

        def register(fn: Callable) -> Callable:
            @lane_rule(op)
            def run(level: BatchLevel, *args: Any) -> Any:
                _check_all_here(level, op)
                below = [map_tensors(lambda t: level.expanded(t).contiguous(), arg) for arg in args]
                return map_tensors(functional.wait_tensor.default, fn(level.size, *below))

            return fn

        return register

    for _op in (
        functional.all_reduce.default,
        functional.all_reduce_coalesced.default,
        functional.broadcast.default,
    ):
        _returning(_op)(lambda lanes, *args, op=_op: op(*args))

    @batch_rule(functional.wait_tensor.default)
    def wait_tensor(lanes, x):
        """x [B, *S] -> the same, once it is there"""
        return functional.wait_tensor.default(x)

    if hasattr(functional, "_wrap_tensor_autograd"):  # from torch 2.13 on
        # A tensor that waits when it is used, which no lane need do.
        batch_rule(functional._wrap_tensor_autograd.default)(wait_tensor)

    @_returning(functional.all_gather_into_tensor.default)
    def all_gather_into_tensor(lanes, x, group_size, group_name):
        """x [B, n, *S] -> [B, group_size * n, *S]"""
        out = functional.all_gather_into_tensor.default(x, group_size, group_name)
        parts = functional.wait_tensor.default(out).unflatten(0, (group_size, lanes))
        return parts.transpose(0, 1).flatten(1, 2)

    @_returning(functional.all_gather_into_tensor_coalesced.default)
    def all_gather_into_tensor_coalesced(lanes, xs, group_size, group_name):
        """xs of [B, n, *S] -> as many of [B, group_size * n, *S]"""
        return [all_gather_into_tensor(lanes, x, group_size, group_name) for x in xs]

    @_returning(functional.reduce_scatter_tensor.default)
    def reduce_scatter_tensor(lanes, x, reduce_op, group_size, group_name):
        """x [B, group_size * n, *S] -> [B, n, *S]"""
        parts = x.unflatten(1, (group_size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
        return functional.reduce_scatter_tensor.default(parts, reduce_op, group_size, group_name)

    @_returning(functional.reduce_scatter_tensor_coalesced.default)
    def reduce_scatter_tensor_coalesced(lanes, xs, reduce_op, group_size, group_name):
        """xs of [B, group_size * n, *S] -> as many of [B, n, *S]"""
        return [reduce_scatter_tensor(lanes, x, reduce_op, group_size, group_name) for x in xs]

    @_returning(functional.all_to_all_single.default)
    def all_to_all_single(lanes, x, received, sent, group_name):
        """x [B, sum(sent), *S] -> [B, sum(received), *S]: the lanes behind the dim that is split"""
        out = functional.all_to_all_single.default(x.transpose(0, 1).contiguous(), received, sent, group_name)
        return functional.wait_tensor.default(out).transpose(0, 1)

    for _name in ("batch_p2p_ops", "irecv", "isend"):
        if hasattr(functional, _name):
            _op = getattr(functional, _name).default
            refuse(
                _op,
                f"vmap: {_op}: one message for each lane, and the other process knows nothing of lanes",
                "dist.send(x, 1)  # all lanes in one message, which dist.recv of lanes takes",
            )
