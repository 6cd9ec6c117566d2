"""`jacrev`, `jacfwd`, `hessian`: all derivatives at once, one lane for each row or column.

A complex function has the derivative that it has as a function of complex numbers. With inputs x and outputs y:

- real x: dy/dx, complex where y is.
- complex x, complex y: the complex derivative dy/dz. A function that is not holomorphic has none, and is refused.
- complex x, real y: dy/d(re x) + i dy/d(im x), the convention of `grad`.

A complex derivative takes two lanes for each number: along 1 and along i.
"""

import functools
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from lanewise._core.again.around import undo_writes_around
from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.level import current_level
from lanewise._core.parting.lanes import Disagreement, arrived, machine, raise_caught
from lanewise._core.plane import sync
from lanewise._core.recording.graphs import needs_graph
from lanewise._core.recording.kept_history import with_history
from lanewise._core.short.shared import WatchedLevel
from lanewise._core.trees import LEAF, Spec, flatten, leaf_names, unflatten
from lanewise._torch_compat import peer_engine_active
from lanewise._transforms.arguments import (
    Site,
    check_argnums,
    check_differentiable,
    check_not_nested,
    check_output_dtypes,
    check_outputs,
    check_tensors,
    closure_of,
    code_made_by,
    input_names,
    not_callable,
    refuse_peer,
    replace,
    select,
    split_aux,
)
from lanewise._transforms.basis import Basis, of_forward, of_reverse
from lanewise._transforms.below import are_few, jacobian_below, note_made
from lanewise._transforms.chunks import check_chunk_options, map_chunks
from lanewise._transforms.compiling import is_compiling, traced, without_keywords
from lanewise._transforms.dims import check_randomness
from lanewise._transforms.forward import push_forward
from lanewise._transforms.recording import Recording, pull_back, tracked, untrack
from lanewise.errors import hide_own_frames

# The call that messages name, where `jacrev` is a part of it.
_named: ContextVar[tuple[str, Callable] | None] = ContextVar("_named", default=None)


def jacrev(
    func: Callable,
    argnums: int | tuple[int, ...] | None = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | str | None = None,
    memory_budget: int | None = None,
    progress: bool | str = False,
    _preallocate_and_copy: bool = False,
) -> Callable:
    """The Jacobian of `func`, by one backward pass whose lanes are the rows.

    The better choice for a function with fewer numbers in its result than in its arguments.

    Complex functions: of a real x, dy/dx, complex where y is; of a complex x to a complex y, the complex derivative,
    for which the function must be holomorphic (`conj`, `abs`, `real` and `imag` are not); of a complex x to a real y,
    dy/d(re x) + i dy/d(im x), the convention of `grad`.

    Args:
        func: A function of tensors or structures of tensors, which returns such, or `(result, aux)` if `has_aux`.
        argnums: Which positional arguments to differentiate with respect to, an int or a tuple of ints; None for all.
        has_aux: Whether `func` also returns something to hand through.
        chunk_size: Take so many rows at a time, to bound the memory; `"auto"` takes the largest power of two whose
            peak memory, estimated from two small chunks, fits `memory_budget`. None takes all at once.
        memory_budget: Bytes for `chunk_size="auto"`; half of the free memory if None.
        progress: Show a bar over the rows, a string as its label; only the outermost of nested chunk loops does.

    Returns:
        A function of the same arguments that returns `[*y, *x]` for each tensor `[*y]` of the result and each tensor
        `[*x]` of the argument: the structure of the result outside, that of the argument inside; with aux, a pair.

    Raises:
        RuntimeError: The result holds something that cannot be differentiated, a complex function is not holomorphic,
            or `argnums` does not fit.
        ValueError: An argument to differentiate with respect to is no tensor, or `chunk_size` makes no sense.

    Example:
        >>> import torch
        >>> from lanewise import jacrev
        >>> jacrev(lambda x: x * x.sum())(torch.tensor([1.0, 2.0]))
        tensor([[4., 1.],
                [2., 5.]])
    """
    if not callable(func):
        raise not_callable("jacrev", func)
    check_chunk_options("jacrev", chunk_size, memory_budget)
    estimates: dict = {}
    api, shown = (not is_compiling() and _named.get()) or ("jacrev", func)

    @functools.wraps(func)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            plain = without_keywords(func, kwargs)
            return traced("jacrev", plain, argnums, has_aux=has_aux, chunk_size=chunk_size)(*args)
        try:
            if peer_engine_active():
                raise refuse_peer("jacrev")
            site = (api, shown, args, kwargs, argnums)
            positions = all_positions(site, argnums, args)
            leaves, in_spec = read_inputs(site, args, positions)
            here = current_level()
            watched = here is not None and here.watching and chunk_size is None and not progress
            if watched:
                call = lambda leaves: func(*replace(args, positions, unflatten(leaves, in_spec)), **kwargs)
                found = jacobian_below(here, site, leaves, has_aux, call)
                if found is not None:
                    columns, outputs, out_spec, aux = found
                    basis = Basis(outputs, [False] * len(outputs))
                    result = _of_columns(site, columns, leaves, basis, (in_spec, out_spec))
                    return (result, aux) if has_aux else result
            with Recording(noted=watched) as recording:
                outer = recording.outer
                inputs = [tracked(leaf, outer) for leaf in leaves]
                args, kwargs = recording.ordinary(args, kwargs)
                value = func(*replace(args, positions, unflatten(list(inputs), in_spec)), **kwargs)
                value, aux = split_aux(site, value, has_aux)
                outputs, out_spec = flatten(value)
                check_outputs(site, value, outputs)
                check_output_dtypes(outputs, value, site)
                name = lambda position: leaf_names(value, "output")[position]
                check_not_nested(site, outputs, name, "return y.to_padded_tensor(0.0)")
                basis = Basis(outputs, [out.is_complex() for out in outputs])
                create_graph = outer and needs_graph(outputs, inputs)
                if create_graph:
                    note_made(here, outputs)
                chunked = chunk_size is not None or bool(progress)
                recordable = isinstance(here, WatchedLevel) and here.recordable and are_few(outputs)

                def run(start: int, length: int) -> tuple[list, list, Spec]:
                    last = start + length >= basis.total
                    if basis.total == 1 and len(outputs) == 1 and not chunked:
                        one = basis.only()
                        return pull_back(outputs, inputs, one, outer, create_graph=create_graph), [], LEAF
                    cotangents = basis.rows(start, length)
                    if length == 1 and (chunk_size == 1 or basis.total == 1):
                        one = [row[0] for row in cotangents]
                        grads = pull_back(outputs, inputs, one, outer, create_graph=create_graph, retain_graph=not last)
                        return [g[None] for g in grads], [], LEAF
                    level = BatchLevel(length)
                    level.restartable, level.journal = True, []
                    try:
                        with level:
                            # The plane below records what the backward pass does if somebody outside differentiates it.
                            level.grad_mode = create_graph
                            lanes: list[Tensor] = [level.wrap(row) for row in cotangents]
                            # Kept: where a hook branches on the gradients, each row goes back on its own.
                            grads = pull_back(
                                outputs, inputs, lanes, outer, create_graph=create_graph, retain_graph=True
                            )
                            if machine.raised:
                                raise_caught(level, Disagreement)
                        return [lanes_of(level, g) for g in grads], [], LEAF
                    except BaseException as error:
                        if arrived(level, error, Disagreement) is None:
                            raise
                        undo_writes_around(level)
                    each = []
                    for i in range(length):
                        one = [row[i] for row in cotangents]
                        each.append(
                            pull_back(outputs, inputs, one, outer, create_graph=create_graph, retain_graph=True)
                        )
                    return [torch.stack(column) for column in zip(*each)], [], LEAF

                if not chunked:
                    columns = run(0, basis.total)[0]
                else:
                    results = map_chunks(
                        run,
                        basis.total,
                        chunk_size,
                        memory_budget=memory_budget,
                        progress=progress,
                        label="jacrev",
                        randomness="error",
                        leaves=[*inputs, *outputs],
                        estimates=estimates,
                    )
                    columns = join([leaves for leaves, _, _ in results], inputs, basis.total, _preallocate_and_copy)
                if has_aux:
                    aux = untrack(aux, inputs, outer)
                if isinstance(here, WatchedLevel):
                    here.recordable = recordable  # whatever the rows needed, which are passes of their own below
            result = _of_columns(site, columns, inputs, basis, (in_spec, out_spec))
            return (result, aux) if has_aux else result
        except Exception as error:
            hide_own_frames(error)
            raise

    return jacobian


def _of_columns(site: Site, columns: list, inputs: list, basis: Basis, specs: tuple[Spec, Spec]) -> Any:
    """The Jacobian from `[total, *x]` for each input x: in the structure of the outputs, and in that of the inputs."""
    in_spec, out_spec = specs
    blocks = [of_reverse(site, column, x, basis) for column, x in zip(columns, inputs)]
    if in_spec is LEAF and out_spec is LEAF:
        return blocks[0][0]
    rows = [unflatten([column[i] for column in blocks], in_spec) for i in range(len(basis.tensors))]
    return unflatten(rows, out_spec)


class Jacobian:
    """What a function does that `jacrev` or `jacfwd` have made, without options.

    Attributes:
        func, argnums, has_aux: What they were given.
        forward: Whether it was `jacfwd`.
    """

    __slots__ = ("func", "argnums", "has_aux", "forward")

    def __init__(self, given: dict[str, Any], forward: bool) -> None:
        self.func, self.argnums, self.has_aux = given["func"], given["argnums"], given["has_aux"]
        self.forward = forward


def jacobian_of(function: Any) -> Jacobian | None:
    """What a function does, if `jacrev` or `jacfwd` have made it and take all rows or columns at once."""
    forward = _MADE.get(function.__code__) if type(function) is types.FunctionType else None
    if forward is None:
        return None
    given = closure_of(function)
    return None if given["progress"] or given["chunk_size"] is not None else Jacobian(given, forward)


def jacfwd(
    func: Callable,
    argnums: int | tuple[int, ...] | None = 0,
    has_aux: bool = False,
    *,
    randomness: str = "error",
    chunk_size: int | str | None = None,
    memory_budget: int | None = None,
    progress: bool | str = False,
) -> Callable:
    """The Jacobian of `func`, by one forward pass whose lanes are the columns.

    The better choice for a function with fewer numbers in its arguments than in its result.

    Complex functions: of a real x, dy/dx, complex where y is; of a complex x to a complex y, the complex derivative,
    for which the function must be holomorphic (`conj`, `abs`, `real` and `imag` are not); of a complex x to a real y,
    dy/d(re x) + i dy/d(im x), the convention of `grad`.

    Args:
        func: A function of tensors or structures of tensors, which returns such, or `(result, aux)` if `has_aux`.
        argnums: Which positional arguments to differentiate with respect to, an int or a tuple of ints; None for all.
        has_aux: Whether `func` also returns something to hand through.
        randomness: As in `vmap`: what random operations of the function give in each column.
        chunk_size: Take so many columns at a time, to bound the memory; `"auto"` takes the largest power of two whose
            peak memory, estimated from two small chunks, fits `memory_budget`. None takes all at once.
        memory_budget: Bytes for `chunk_size="auto"`; half of the free memory if None.
        progress: Show a bar over the columns, a string as its label; only the outermost of nested chunk loops does.

    Returns:
        A function of the same arguments that returns `[*y, *x]` for each tensor `[*y]` of the result and each tensor
        `[*x]` of the argument: the structure of the result outside, that of the argument inside; with aux, a pair.

    Raises:
        RuntimeError: The result holds something that cannot be differentiated, a complex function is not holomorphic,
            or `argnums` does not fit.
        ValueError: An argument to differentiate with respect to is no tensor, or `chunk_size` makes no sense.

    Example:
        >>> import torch
        >>> from lanewise import jacfwd
        >>> jacfwd(lambda x: x * x.sum())(torch.tensor([1.0, 2.0]))
        tensor([[4., 1.],
                [2., 5.]])
    """
    if not callable(func):
        raise not_callable("jacfwd", func)
    check_randomness(randomness, "jacfwd")
    check_chunk_options("jacfwd", chunk_size, memory_budget)
    estimates: dict = {}

    @functools.wraps(func)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            plain = without_keywords(func, kwargs)
            return traced("jacfwd", plain, argnums, has_aux, randomness=randomness, chunk_size=chunk_size)(*args)
        try:
            if peer_engine_active():
                raise refuse_peer("jacfwd")
            site = ("jacfwd", func, args, kwargs, argnums)
            positions = all_positions(site, argnums, args)
            leaves, in_spec = read_inputs(site, args, positions)
            basis = Basis(leaves, [leaf.is_complex() for leaf in leaves])

            def of_leaves(*duals: Tensor) -> Any:
                return func(*replace(args, positions, unflatten(list(duals), in_spec)), **kwargs)

            def run(start: int, length: int) -> tuple[list, Any, Spec]:
                directions = basis.rows(start, length)
                if chunk_size == 1 and basis.total:
                    out = push_forward(
                        site, of_leaves, tuple(leaves), tuple([row[0] for row in directions]), False, has_aux
                    )
                    pushed, spec = flatten(out[1])
                    return [t[None] for t in pushed], (out[2] if has_aux else None), spec
                level = BatchLevel(length, randomness, basis.total, start)
                level.directions = randomness != "different"
                with level:
                    tangents = tuple([level.wrap(row) for row in directions])
                    out = push_forward(site, of_leaves, tuple(leaves), tangents, False, has_aux)
                    pushed, spec = flatten(out[1])
                    aux = first_lane(level, out[2]) if has_aux else None
                    return [lanes_of(level, t) for t in pushed], aux, spec

            if chunk_size is None and not progress:
                rows, aux, out_spec = run(0, basis.total)
            else:
                results = map_chunks(
                    run,
                    basis.total,
                    chunk_size,
                    memory_budget=memory_budget,
                    progress=progress,
                    label="jacfwd",
                    # A row at a time, the function may draw random numbers: the same for each row.
                    randomness="same" if randomness == "error" and chunk_size == 1 else randomness,
                    leaves=leaves,
                    estimates=estimates,
                )
                _, aux, out_spec = results[0]
                outputs = [t[0] for t in results[0][0]] if basis.total else []
                rows = join([pushed for pushed, _, _ in results], outputs, basis.total, False)
            blocks = [unflatten(of_forward(site, row, basis), in_spec) for row in rows]
            result = unflatten(blocks, out_spec)
            return (result, aux) if has_aux else result
        except Exception as error:
            hide_own_frames(error)
            raise

    return jacobian


def hessian(
    func: Callable,
    argnums: int | tuple[int, ...] | None = 0,
    *,
    has_aux: bool = False,
    randomness: str = "error",
    chunk_size: int | str | None = None,
    memory_budget: int | None = None,
    progress: bool | str = False,
) -> Callable:
    """The Hessian of `func`: the Jacobian of its Jacobian.

    Args:
        func: A function of tensors or structures of tensors, which returns such, or `(result, aux)` if `has_aux`.
        argnums: Which positional arguments to differentiate with respect to, an int or a tuple of ints; None for all.
        has_aux: Whether `func` also returns something to hand through.
        randomness: As in `vmap`; the function runs once, so that all of the Hessian sees the same random numbers.
        chunk_size: Take so many rows at a time, to bound the memory; `"auto"` takes the largest power of two whose
            peak memory, estimated from two small chunks, fits `memory_budget`. None takes all at once.
        memory_budget: Bytes for `chunk_size="auto"`; half of the free memory if None.
        progress: Show a bar over the rows, a string as its label; only the outermost of nested chunk loops does.

    Returns:
        A function of the same arguments that returns `[*y, *x, *x]`; with several arguments or structures of them, one
        for each pair, the first derivative's structure outside; with aux, a pair.

    Raises:
        RuntimeError: The result holds something that cannot be differentiated, a complex function is not holomorphic,
            or `argnums` does not fit.
        ValueError: An argument to differentiate with respect to is no tensor, or `chunk_size` makes no sense.

    Example:
        >>> import torch
        >>> from lanewise import hessian
        >>> hessian(lambda x: (x**3).sum())(torch.tensor([1.0, 2.0]))
        tensor([[ 6.,  0.],
                [ 0., 12.]])
    """
    if not callable(func):
        raise not_callable("hessian", func)
    check_randomness(randomness, "hessian")
    before = None if is_compiling() else _named.set(("hessian", func))
    try:
        return jacrev(
            jacrev(func, argnums, has_aux=has_aux),
            argnums,
            has_aux=has_aux,
            chunk_size=chunk_size,
            memory_budget=memory_budget,
            progress=progress,
        )
    finally:
        if before is not None:
            _named.reset(before)


def read_inputs(site: Site, args: tuple, argnums: int | tuple[int, ...]) -> tuple[list[Tensor], Spec]:
    """The leaves to differentiate with respect to, and their structure."""
    chosen = select(args, argnums)
    if isinstance(chosen, Tensor):
        leaves, spec = [chosen], LEAF
    else:
        leaves, spec = flatten(chosen)
        check_tensors(leaves, site, argnums)
    check_differentiable(leaves, site, argnums)
    check_not_nested(
        site,
        leaves,
        lambda position: input_names(site, argnums)[position],
        "grad(f)({name})  # or vjp, which take nested tensors\n"
        "jacrev(lambda parts: f(torch.nested.as_nested_tensor(parts, layout=torch.jagged)))(list({name}.unbind()))",
    )
    return leaves, spec


def all_positions(site: Site, argnums: Any, args: tuple) -> int | tuple[int, ...]:
    """`argnums` as positions; None stands for all arguments."""
    return tuple(range(len(args))) if argnums is None else check_argnums(site, argnums, len(args))


def lanes_of(level: BatchLevel, tensor: Tensor) -> Tensor:
    """The value below, `[B, *S]`."""
    if type(tensor) is BatchTensor and tensor.level is level:
        if not tensor.mapped:
            sync(tensor)
        return with_history(level, tensor, level.expanded(tensor))
    return tensor.expand(level.size, *tensor.shape)


def first_lane(level: BatchLevel, tree: Any) -> Any:
    """`tree` on the plane below; of a value that differs from lane to lane, the first."""
    leaves, spec = flatten(tree)

    def take(leaf: Any) -> Any:
        if type(leaf) is not BatchTensor or leaf.level is not level:
            return leaf
        sync(leaf)
        return with_history(level, leaf, leaf.value[0] if leaf.mapped else leaf.value)

    return unflatten([take(leaf) for leaf in leaves], spec)


def join(chunks: list[list[Tensor]], like: list[Tensor], total: int, preallocate: bool) -> list[Tensor]:
    """The chunks of each tensor, `[length, *S]` each, as one `[total, *S]`."""
    if len(chunks) == 1:
        return chunks[0]
    if not preallocate:
        return [torch.cat(parts) for parts in zip(*chunks)]
    joined = [torch.zeros((total, *first.shape[1:]), dtype=first.dtype, device=first.device) for first in chunks[0]]
    start = 0
    for parts in chunks:
        for whole, part in zip(joined, parts):
            whole[start : start + len(part)].copy_(part)
        start += len(parts[0])
    return joined


_MADE = {code_made_by(jacrev): False, code_made_by(jacfwd): True}
