"""What the transforms share in reading arguments: the call as written, `argnums`, `has_aux`, the leaves."""

import functools
import inspect
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module

from lanewise._core.layouts import layout_of
from lanewise._core.trees import is_leaf, leaf_names
from lanewise.errors import ArgumentError, TransformError, at_user_line

_FOLDER = os.path.dirname(__file__)


def function_name(func: Any) -> str:
    """A function as messages name it: `loss`, and what a transform has made of it `grad(loss)`."""
    if isinstance(func, functools.partial):
        return f"functools.partial({function_name(func.func)}, ...)"
    code: Any = getattr(func, "__code__", None)
    # (Before Python 3.11, code does not know in which function it stands.)
    made_by = getattr(code, "co_qualname", {"gradient": "grad"}.get(getattr(code, "co_name", ""), ""))
    made_by = made_by.partition(".<locals>")[0]
    if hasattr(func, "__wrapped__") and code is not None and os.path.dirname(code.co_filename) == _FOLDER:
        if "shown" in code.co_freevars:
            given = closure_of(func)
            return f"{given['api']}({function_name(given['shown'])})"
        if made_by:
            return f"{made_by}({function_name(func.__wrapped__)})"
    name = getattr(func, "__name__", None)
    if name is None:
        return type(func).__name__
    return "f" if name == "<lambda>" else name


def code_made_by(transform: Callable) -> types.CodeType:
    """The code of the functions that a transform makes: by it they are known, whoever hands their attributes on."""
    made = [part for part in transform.__code__.co_consts if isinstance(part, types.CodeType)]
    return next(code for code in made if code.co_name.isidentifier())


def closure_of(function: types.FunctionType) -> dict[str, Any]:
    """What a function has from the scopes around it, by name."""
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ())}


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
            f", {name}={value!r}"
            for name, value in self.options.items()
            if value is not None and not (type(value) is int and value == 0)
        )
        given = self.arguments_text()
        if self.api in ("vjp", "jvp", "linearize"):
            return f"{self.api}({self.name}{', ' * bool(given)}{given})"
        return f"{self.api}({self.name}{options})({given})"

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


# Calls of the transforms that take the arguments of the function themselves.
_CALLS = {"jvp": "jvp(f, (x,), (t,))", "linearize": "linearize(f, x)", "vjp": "vjp(f, x)"}


def not_callable(api: str, func: Any) -> TypeError:
    """The error for something else in place of the function, such as its result."""
    why = f"{api}: expected a function as the first argument, got {type(func)}"
    return TypeError(at_user_line(why, _CALLS.get(api, f"{api}(f)(x)")))


# Where an error arose: the transform's name, or `(api, func, args, kwargs, argnums)` to show the call itself.
Site = str | tuple[str, Callable, tuple, dict, Any]


def call_text(site: Site) -> str:
    """The call as written, as far as it is known."""
    return site if isinstance(site, str) else str(call_of(site))


def call_of(site: Site) -> Call:
    """The call at a site that has one."""
    assert not isinstance(site, str)
    api, func, args, kwargs, argnums = site
    return Call(api, func, args, kwargs, {"argnums": argnums})


def input_names(site: Site, argnums: int | tuple[int, ...] | None = None) -> list[str]:
    """A name for each leaf of the arguments that `argnums` chooses, such as `params['w']`."""
    call = call_of(site)
    roots = call.argument_names()
    positions = range(len(roots)) if argnums is None else (argnums,) if isinstance(argnums, int) else argnums
    return [name for position in positions for name in leaf_names(call.args[position], roots[position])]


def check_argnums(site: Site, argnums: Any, count: int) -> int | tuple[int, ...]:
    """`argnums` as non-negative positions among `count` arguments."""
    if type(argnums) is int and 0 <= argnums < count:
        return argnums
    if not isinstance(argnums, (int, tuple)) or isinstance(argnums, bool):
        raise _argnums_error(site, f"argnums must be int or Tuple[int, ...], got: {type(argnums)}", count)
    if isinstance(argnums, int):
        return _check_argnum(site, argnums, count)
    if not argnums:
        raise _argnums_error(site, "argnums must be non-empty, got: ()", count)
    for argnum in argnums:
        if isinstance(argnum, bool) or not isinstance(argnum, int):
            raise _argnums_error(site, f"argnums must be int or Tuple[int, ...], got: {argnums}", count)
    positions = tuple([_check_argnum(site, argnum, count) for argnum in argnums])
    if len(set(positions)) != len(positions):
        raise _argnums_error(site, f"argnums elements must be unique, got: {argnums}", count)
    return positions


def _check_argnum(site: Site, argnum: int, count: int) -> int:
    if not -count <= argnum < count:
        bounds = f": positions go from {-count} to {count - 1}" if count else ""
        raise _argnums_error(
            site,
            f"Got argnum={argnum}, but only {count} positional inputs{bounds}. An argument passed by keyword cannot be "
            "differentiated",
            count,
        )
    return argnum % count


def _argnums_error(site: Site, text: str, count: int) -> TransformError:
    if isinstance(site, str):
        return TransformError(at_user_line(f"{site}: {text}"))
    call = call_of(site)
    given = (call.arguments_text() if count else ", ".join(call.kwargs)) or "x"
    argnums = f", argnums={tuple(range(count))}" if count > 1 else ""
    return TransformError(at_user_line(f"{call}: {text}", f"{call.api}({call.name}{argnums})({given})"))


def select(args: tuple, argnums: int | tuple[int, ...]) -> Any:
    """The argument or the tuple of arguments that `argnums` names."""
    return args[argnums] if isinstance(argnums, int) else tuple([args[position] for position in argnums])


def replace(args: tuple, argnums: int | tuple[int, ...], new: Any) -> tuple:
    """`args` with the selected ones replaced."""
    replaced = list(args)
    if isinstance(argnums, int):
        replaced[argnums] = new
    else:
        for position, value in zip(argnums, new, strict=True):
            replaced[position] = value
    return tuple(replaced)


def check_tensors(leaves: list, site: Site, argnums: int | tuple[int, ...] | None = None) -> None:
    """Raise unless all leaves are tensors, naming the one that is not."""
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            name = input_names(site, argnums)[position]
            if hasattr(leaf, "__array__"):
                instead = f"{name} = torch.as_tensor({name})"
            elif isinstance(leaf, Module):
                instead = (
                    f"params = dict({name}.named_parameters())\nfunctional_call({name}, params, x)  # in f(params, x)"
                )
            elif isinstance(leaf, Iterator):
                instead = f"{name} = dict(model.named_parameters())  # a structure of tensors, not an iterator"
            else:
                instead = f"{name} = torch.tensor({leaf!r})" if isinstance(leaf, (int, float)) else "close over it in f"
            raise ArgumentError(
                at_user_line(
                    f"{call_text(site)}: Thing passed to transform API must be Tensor, got {type(leaf)} for {name}",
                    instead,
                )
            )


def check_differentiable(leaves: list[Tensor], site: Site, argnums: int | tuple[int, ...] | None = None) -> None:
    """Raise unless all inputs have a floating point or complex dtype, naming the one that has not."""
    for position, leaf in enumerate(leaves):
        if leaf.is_floating_point() or leaf.is_complex():
            continue
        name = input_names(site, argnums)[position]
        where = f"{leaf.dtype} for {name} {list(leaf.shape)}"
        instead = f"{name}.float()  # or leave the argument out of argnums"
        if not isinstance(site, str) and site[0] == "jacfwd":
            raise ArgumentError(
                at_user_line(
                    f"{call_text(site)}: Expected primal to be floating point or complex, but got: {where}", instead
                )
            )
        raise TransformError(
            at_user_line(
                f"{call_text(site)}: only Tensors of floating point dtype can require gradients, got {where}", instead
            )
        )


def check_output_dtypes(outputs: list[Tensor], value: Any, site: Site) -> None:
    """Raise unless all outputs have a floating point or complex dtype, naming the one that has not."""
    for position, out in enumerate(outputs):
        if not (out.is_floating_point() or out.is_complex()):
            name = leaf_names(value, "output")[position]
            raise TransformError(
                at_user_line(
                    f"{call_text(site)}: All outputs of f must be floating-point or complex Tensors, got {out.dtype} "
                    f"for {name} {list(out.shape)}",
                    "return y, count  # integer results as aux, with has_aux=True",
                )
            )


def check_not_nested(site: Site, tensors: list, names: Callable[[int], str], instead: str) -> None:
    """Raise where a Jacobian would have dims whose size differs from row to row."""
    for position, x in enumerate(tensors):
        if x.is_nested:
            name = names(position)
            raise TransformError(
                at_user_line(
                    f"{call_text(site)}: {name} is a nested tensor of {x.size(0)} components: a Jacobian has all dims "
                    "of the result and of the argument, and theirs differ",
                    instead.format(name=name),
                )
            )


def check_scalar(site: Site, value: Any) -> None:
    """Raise unless `value` is a real 0-dim tensor."""
    if not isinstance(value, Tensor):
        raise TransformError(
            at_user_line(
                f"{call_text(site)}: Expected f to return a Tensor, got type {type(value)}",
                _with_aux(site, value) + "return loss  # a 0-dim tensor",
            )
        )
    if value.dim() != 0:
        raise TransformError(
            at_user_line(
                f"{call_text(site)}: Expected f to return a scalar Tensor, got tensor with {value.dim()} dims "
                f"{list(value.shape)}. Maybe you wanted to use the vjp or jacrev APIs instead?",
                "return loss.sum()  # or: jacrev(f)(x)",
            )
        )
    if value.is_complex():
        raise TransformError(
            at_user_line(
                f"{call_text(site)}: grad can be implicitly created only for real scalar outputs but got {value.dtype}",
                "return loss.abs()  # or loss.real; or: jacrev(f)(z), the complex derivative",
            )
        )


def _with_aux(site: Site, value: Any) -> str:
    """What to write where a function returns its loss and something else, empty where it does not."""
    if isinstance(site, str) or not isinstance(value, tuple) or not value or not isinstance(value[0], Tensor):
        return ""
    call = call_of(site)
    call.options["has_aux"] = True
    if len(value) == 2:
        return f"{call}  # f returns (loss, aux)\n"
    return f"{call}  # f returns (loss, aux), aux a tuple of the others\n"


def check_outputs(site: Site, value: Any, outputs: list) -> None:
    """Raise unless the outputs are tensors, at least one."""
    for position, out in enumerate(outputs):
        if not isinstance(out, Tensor):
            name = leaf_names(value, "output")[position]
            raise TransformError(
                at_user_line(
                    f"{call_text(site)}: expected f(*primals) to return only tensors, got unsupported type {type(out)} "
                    f"for {name}",
                    "return y" if value is None else "return y, note  # other values as aux, with has_aux=True",
                )
            )
    if not outputs:
        raise TransformError(
            at_user_line(
                f"{call_text(site)}: Expected f to be a function that has non-empty output (got output = {value!r})",
                "return y  # at least one tensor",
            )
        )


def cotangents_mismatch(got: Any, wanted: Any) -> TransformError:
    """The error for cotangents of another structure than the output."""
    return TransformError(
        at_user_line(
            "vjp_fn(cotangents): Expected pytree structure of cotangents to be the same as pytree structure of outputs "
            f"to the function. cotangents: {got}, primal output: {wanted}",
            f"vjp_fn({_with_names(wanted)})  # one argument, with the structure of what f returns",
        )
    )


def several_cotangents(wanted: Any) -> TransformError:
    """The error for cotangents that were given one by one."""
    return TransformError(
        at_user_line(
            "vjp_fn(cotangents, retain_graph=True, create_graph=None): Expected pytree structure of cotangents to be "
            "the same as pytree structure of outputs to the function, as one argument: got a tensor as retain_graph. "
            f"Primal output: {wanted}",
            f"vjp_fn({_with_names(wanted)})  # one argument, with the structure of what f returns",
        )
    )


def _with_names(spec: Any) -> str:
    """A structure with names of cotangents for its leaves: `(ct0, ct1)`."""
    before, *rest = str(spec).split("*")
    return before + "".join(f"ct{'' if len(rest) == 1 else number}{part}" for number, part in enumerate(rest))


def cotangent_mismatch(cotangent: Any, output: Tensor, value: Any, position: int) -> TransformError:
    """The error for one cotangent that does not fit its output."""
    name = leaf_names(value, "output")[position]
    if output.is_nested:
        given = layout_of(cotangent) if isinstance(cotangent, Tensor) else type(cotangent)
        return TransformError(
            at_user_line(
                f"vjp_fn(cotangents): Mismatch in shape: grad_output[{position}] is {given} and {name} a nested tensor "
                f"of {output.size(0)} components, which the cotangent must have, too, with the same offsets",
                f"vjp_fn(torch.ones_like(y))  # of {name}, or made of it in another way",
            )
        )
    got = f"has a shape of {list(cotangent.shape)}" if isinstance(cotangent, Tensor) else f"is a {type(cotangent)}"
    return TransformError(
        at_user_line(
            f"vjp_fn(cotangents): Mismatch in shape: grad_output[{position}] {got} and {name} has a shape of "
            f"{list(output.shape)}",
            f"vjp_fn(torch.ones({list(output.shape)}))" if is_leaf(value) else "",
        )
    )


def split_aux(site: Site, out: Any, has_aux: bool) -> tuple[Any, Any]:
    """The output and its auxiliary part."""
    if not has_aux:
        return out, None
    if not isinstance(out, tuple) or len(out) != 2:
        plain = Tensor if isinstance(out, Tensor) else type(out)  # not the class of a plane
        got = f"a tuple of {len(out)}" if isinstance(out, tuple) else str(plain)
        raise TransformError(
            at_user_line(
                f"{call_text(site)}: output of function f should be a tuple: (output, aux) if has_aux is True, got "
                f"{got}",
                "return loss, aux",
            )
        )
    return out
