"""`jvp` and `linearize`: tangents carried forward on a dual plane."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchTensor
from lanewise._core.dual import DualLevel, DualTensor
from lanewise._core.layouts import layout_of
from lanewise._core.linear import LinearLevel, memories
from lanewise._core.parting.lanes import machine
from lanewise._core.parting.leaks import check_derivatives
from lanewise._core.plane import sync, with_memory
from lanewise._core.recording.kept_history import with_history
from lanewise._core.recording.tensor_hooks import with_own_nodes
from lanewise._core.trees import flatten, leaf_names, unflatten
from lanewise._torch_compat import is_alias_of, peer_engine_active
from lanewise._transforms.arguments import Site, check_outputs, function_name, not_callable, refuse_peer, split_aux
from lanewise._transforms.compiling import is_compiling, traced
from lanewise.errors import ArgumentError, TransformError, at_user_line, hide_own_frames


def jvp(func: Callable, primals: tuple, tangents: tuple, *, strict: bool = False, has_aux: bool = False) -> Any:
    """The value of `func` at `primals` and its directional derivative along `tangents`.

    Args:
        func: A function of tensors or containers of tensors, which returns tensors or containers of tensors.
        primals: The arguments of `func`; floating-point or complex tensors `[*S]`.
        tangents: As `primals`, leaf for leaf the same shapes `[*S]`.
        strict: Raise where an output does not depend on the inputs; otherwise its tangent is zero.
        has_aux: `func` returns `(output, aux)`; `aux` may be anything and is handed back without tangents.

    Returns:
        `(output, tangent of output)`, with `aux` as a third where `has_aux`. Integer outputs have zero tangents.

    Raises:
        RuntimeError: The structures or shapes of primals and tangents differ, or an output is not a tensor.
        ValueError: A primal or a tangent is neither floating-point nor complex.

    Example:
        >>> import torch
        >>> from lanewise import jvp
        >>> jvp(torch.sin, (torch.zeros(2),), (torch.ones(2),))
        (tensor([0., 0.]), tensor([1., 1.]))
    """
    if not callable(func):
        raise not_callable("jvp", func)
    if is_compiling():
        return traced("jvp", func, primals, tangents, strict=strict, has_aux=has_aux)
    if peer_engine_active():
        raise refuse_peer("jvp")
    try:
        return push_forward(None, func, primals, tangents, strict, has_aux)
    except Exception as error:
        hide_own_frames(error)
        raise


def push_forward(
    site: Site | None, func: Callable, primals: tuple, tangents: tuple, strict: bool, has_aux: bool
) -> Any:
    """What `jvp` returns; `site` is the call that messages show, if it is not one of `jvp` itself."""
    leaves, tangent_leaves, spec = check_primals(func, primals, tangents)
    level = DualLevel()
    leaves = with_own_nodes(leaves)
    with level:
        duals = [level.wrap(with_memory(x), with_memory(t)) for x, t in zip(leaves, tangent_leaves)]
        out = func(*(duals if spec is None else unflatten(duals, spec)))
        value, aux = split_aux(site or _text("jvp", func), out, has_aux) if has_aux else (out, None)
        if isinstance(value, Tensor):
            result, pushed = leave_leaf(level, value, strict)
            pushed = with_history(level, value, pushed)
            if machine.boundaries:
                check_derivatives([pushed])
        else:
            outputs, out_spec = flatten(value)
            check_outputs(site or _text("jvp", func), value, outputs)
            pairs = [leave_leaf(level, leaf, strict) for leaf in outputs]
            pairs = [(p, with_history(level, leaf, t)) for leaf, (p, t) in zip(outputs, pairs)]
            if machine.boundaries:
                check_derivatives([t for _, t in pairs])
            result = unflatten([p for p, _ in pairs], out_spec)
            pushed = unflatten([t for _, t in pairs], out_spec)
        return (result, pushed, drop_tangents(level, aux)) if has_aux else (result, pushed)


def linearize(func: Callable, *primals: Any) -> tuple[Any, Callable]:
    """The value of `func` at `primals`, and its derivative there as a function of the tangents.

    `func` runs once. What it does to tangents is written down as it runs, and the derivative function repeats that for
    the tangents it is given: no more work than the linear part of `jvp`, with random numbers as they were drawn. It
    can be differentiated, mapped and pushed forward like any function, in the tangents and through `primals`.

    Args:
        func: A function of tensors or containers of tensors, which returns tensors or containers of tensors.
        primals: The arguments of `func`; floating-point or complex tensors `[*S]`.

    Returns:
        `(output, jvp_fn)`; `jvp_fn(*tangents)` takes tangents like `primals` in structure, shape, dtype and device, and
        returns the tangent of the output.

    Raises:
        RuntimeError: An argument or an output is not a tensor, or (from `jvp_fn`) the tangents do not match.
        ValueError: A primal is neither floating-point nor complex.

    Example:
        >>> import torch
        >>> from lanewise import linearize
        >>> value, push = linearize(torch.sin, torch.zeros(2))
        >>> push(torch.ones(2))
        tensor([1., 1.])
    """
    if not callable(func):
        raise not_callable("linearize", func)
    if is_compiling():
        return traced("linearize", func, *primals)
    if peer_engine_active():
        raise refuse_peer("linearize")
    # The alternative, the transpose of the transpose by two reverse passes, needs the second derivative formulas that
    # fused attention, cdist and others lack, knows no user's `jvp`, and takes longer per call for small tensors
    # (10 operations on 5 numbers: 98 to 111 us against 61 to 84) and as long for large ones.
    try:
        leaves, spec = flatten(primals)
        for position, leaf in enumerate(leaves):
            _check_tensor(_text("linearize", func), "primals", primals, leaf, position)
            check_pair("linearize", func, leaf, leaf, position)
        with LinearLevel() as linear:
            tangents = [linear.wrap(linear.below(_blank, leaf)) for leaf in leaves]
            with DualLevel(preserve=linear.preserve) as level:
                leaves = linear.below(with_own_nodes, leaves)
                duals = [level.wrap(with_memory(x), t) for x, t in zip(leaves, tangents)]
                out = func(*unflatten(duals, spec))
                outputs, out_spec = flatten(out)
                check_outputs(_text("linearize", func), out, outputs)
                pairs = [leave_leaf(level, leaf) for leaf in outputs]
            values = [with_history(linear, value, linear.plain(value)) for value, _ in pairs]
            program = linear.program(tangents, [t for _, t in pairs])

        def push(*given: Any) -> Any:
            given_leaves, given_spec = flatten(given)
            if given_spec != spec:
                raise TransformError(
                    at_user_line(
                        f"Expected the tangents {given_spec} to have the same argspec as the primals {spec}",
                        f"jvp_fn({_with_names(spec)})  # a tangent for each primal",
                    )
                )
            for position, (t, x) in enumerate(zip(given_leaves, leaves)):
                check_tangent(position, t, x)
            results = program(given_leaves)
            pushed = [torch.zeros_like(v) if t is None else t for v, t in zip(values, results)]
            return unflatten(pushed, out_spec)

        return unflatten(values, out_spec), push
    except Exception as error:
        hide_own_frames(error)
        raise


def _blank(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


def check_tangent(position: int, t: Any, x: Tensor) -> None:
    """Raise unless `t` is as the primal `x`."""
    if not isinstance(t, Tensor):
        raise TransformError(
            at_user_line(
                f"linearize: Expected tangents to only contain Tensors, got {type(t)} for tangent:{position} in "
                "flattened pytree",
                _tangent_for(t, "x") + f"  # x {list(x.shape)} is its primal",
            )
        )
    for what in ("shape", "device", "dtype"):
        if getattr(t, what) != getattr(x, what):
            raise TransformError(
                at_user_line(
                    f"tangent:{position} with {what} {getattr(t, what)} in flattened pytree doesn't match the {what} "
                    f"{getattr(x, what)} of the corresponding primal.",
                    f"torch.ones({list(x.shape)}, dtype={x.dtype}, device={str(x.device)!r})  # for one",
                )
            )


def _with_names(spec: Any) -> str:
    """The arguments of a structure, with names of tangents: `t0, {'w': t1}`."""
    before, *rest = str(spec).removeprefix("(").removesuffix(")").removesuffix(",").split("*")
    return before + "".join(f"t{number}{part}" for number, part in enumerate(rest))


_AS_TUPLES = "jvp(f, (x, y), (t_x, t_y))  # tuples of the arguments and of their tangents"


def _text(api: str, func: Callable) -> str:
    """The call as written."""
    return f"{api}({function_name(func)}, {'primals, tangents' if api == 'jvp' else '*primals'})"


def check_primals(func: Callable, primals: Any, tangents: Any) -> tuple[list[Tensor], list[Tensor], Any]:
    """Leaves of primals and tangents and their structure (None: a tuple of tensors); raises where they do not match."""
    if type(primals) is tuple and type(tangents) is tuple and len(primals) == len(tangents):
        for position, (x, t) in enumerate(zip(primals, tangents)):
            if not isinstance(x, Tensor) or not isinstance(t, Tensor):
                break
            check_pair("jvp", func, x, t, position)
        else:
            if primals:
                return list(primals), separate(primals, tangents), None
    site = _text("jvp", func)
    if not isinstance(primals, tuple):
        raise TransformError(
            at_user_line(
                f"{site}: Expected primals to be a tuple. E.g. it should be valid to call f(*primals). "
                f"Got {type(primals)}",
                _AS_TUPLES,
            )
        )
    leaves, spec = flatten(primals)
    tangent_leaves, tangent_spec = flatten(tangents)
    if spec != tangent_spec:
        raise TransformError(
            at_user_line(
                f"{site}: Expected primals and tangents to have the same python structure. For example, if primals is "
                f"a tuple of 3 tensors, tangents also must be. Got primals with structure {spec} and tangents with "
                f"structure {tangent_spec}",
                _AS_TUPLES,
            )
        )
    if not leaves:
        raise TransformError(at_user_line(f"{site}: Expected primals to contain at least one Tensor.", _AS_TUPLES))
    for position, (x, t) in enumerate(zip(leaves, tangent_leaves, strict=True)):
        for what, tree, leaf in (("primals", primals, x), ("tangents", tangents, t)):
            _check_tensor(site, what, tree, leaf, position, primals)
        check_pair("jvp", func, x, t, position)
    return leaves, separate(leaves, tangent_leaves), spec


def _check_tensor(site: str, what: str, tree: Any, leaf: Any, position: int, primals: Any = None) -> None:
    """Raise unless a leaf of the primals or tangents, as `what` says, is a tensor."""
    if isinstance(leaf, Tensor):
        return
    if what == "tangents":
        instead = _tangent_for(leaf, leaf_names(primals, "primals")[position])
    else:
        instead = f"torch.tensor({leaf!r})" if isinstance(leaf, (int, float)) else "close over it"
    raise TransformError(
        at_user_line(
            f"{site}: Expected {what} to only contain Tensors, got {type(leaf)} for {leaf_names(tree, what)[position]}",
            instead,
        )
    )


def _tangent_for(number: Any, primal: str) -> str:
    """A tensor in place of what is none as the tangent of a primal."""
    if isinstance(number, (int, float)) and number != 0:
        return f"torch.full_like({primal}, {number!r})"
    return f"torch.zeros_like({primal})"


def check_pair(api: str, func: Callable, x: Tensor, t: Tensor, position: int) -> None:
    """Raise unless both can be differentiated and have the same shape."""
    for what, tensor in (("primal", x), ("tangent", t)):
        if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            raise ArgumentError(
                at_user_line(
                    f"{_text(api, func)}: Expected {what} to be floating point or complex, but got: {tensor.dtype} "
                    f"{list(tensor.shape)} ({what} {position})",
                    f"{what}.float()  # or close over it, if it is an index",
                )
            )
        if tensor.is_nested:
            raise TransformError(
                at_user_line(
                    f"{_text(api, func)}: {what} {position} is a nested tensor of {tensor.size(0)} components: forward "
                    "mode goes through strided tensors only",
                    "jvp(f_of_parts, (list(nested.unbind()),), (list(tangent.unbind()),))  # a list of tensors\n"
                    "or grad and vjp, which take nested tensors",
                )
            )
        if tensor.layout is not torch.strided:
            raise TransformError(
                at_user_line(
                    f"{_text(api, func)}: {what} {position} has the layout {layout_of(tensor)}: forward mode goes "
                    "through strided tensors only",
                    "jvp(lambda values: f(torch.sparse_coo_tensor(indices, values)), (values,), (tangent,))\n"
                    "or grad, vjp and jacrev, which take sparse tensors",
                )
            )
    if x.shape != t.shape:
        raise TransformError(
            at_user_line(
                f"{_text(api, func)}: Trying to set a forward gradient that has a different size than that of the "
                f"original Tensor, this is not supported. Tensor is of size {list(x.shape)} while the given forward "
                f"gradient is of size {list(t.shape)} (primal {position})",
                "t.expand_as(x)  # a tangent for each element of the primal",
            )
        )


def separate(primals: Any, tangents: Any) -> list[Tensor]:
    """The tangents, copied where one lies in the memory of a primal or of another: the function may write to either."""
    if len(tangents) == 1:
        # As below, in a third of the time.
        x, t = primals[0], tangents[0]
        while type(x) is BatchTensor:
            x = x.value
        while type(t) is BatchTensor:
            t = t.value
        if type(x) is type(t) is Tensor and not is_alias_of(x, t):
            return list(tangents)
    seen = {place for x in primals for place in memories(x)}
    found = []
    for t in tangents:
        places = memories(t)
        found.append(t if seen.isdisjoint(places) else t.clone())
        seen.update(places)
    return found


def leave_leaf(level: DualLevel, leaf: Tensor, strict: bool = False) -> tuple[Tensor, Tensor]:
    """Primal and tangent of a result, on the plane below."""
    if type(leaf) is DualTensor and leaf.level is level:
        if leaf.tangent is None:
            sync(leaf)
        value = with_history(level, leaf, leaf.value)
        if leaf.tangent is not None:
            return value, leaf.tangent
        leaf = value
    if strict:
        raise TransformError(
            at_user_line(
                "jvp(f, primals, tangents, strict=True): The output of f is independent of the inputs. This is not "
                "allowed with strict=True."
            )
        )
    return leaf, level.below(torch.zeros_like, leaf)


def drop_tangents(level: DualLevel, tree: Any) -> Any:
    """`tree` on the plane below, without tangents; what is no tensor stays as it is."""
    leaves, spec = flatten(tree)

    def drop(leaf: Any) -> Any:
        if not level.owns(leaf):
            return leaf
        sync(leaf)
        return with_history(level, leaf, leaf.value)

    return unflatten([drop(leaf) for leaf in leaves], spec)
