"""Functions of cheap elementwise operations, run for all lanes at once with masks in place of branches.

To part lanes, to gather their values and to put them together costs more than such a function does. predication.py says
which functions these are. A call is served where all its operands are plain tensors `[B]` or `[B, S]`, a number or a
vector of each lane, and nothing else looks on; for any other the lanes part.
"""

import builtins
import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lanewise._control.masking.masks import ELEMENTWISE_FUNCTIONS, FEW, Failing, Lasting, Masks, Numbers
from lanewise._control.masking.predication import Predicated, predicated
from lanewise._control.masking.vectors import Matrix, Narrow
from lanewise._control.rewriting.compiling import definition
from lanewise._control.rewriting.source import Unsupported, compile_definition
from lanewise._core.short.hot import inert
from lanewise._torch_compat import has_module_hooks, is_grad_enabled

STRICTEST = 2
# A function with more branches than these runs a small part of what is in it for each of its lanes.
_BRANCHES = 12

_GIVEN: dict[str, Any] = {name: getattr(builtins, name) for name in ("abs", "enumerate", "len", "range")}
_GIVEN |= {"torch": torch, "math": math, "F": torch.nn.functional}
_NUMBERS = frozenset([bool, int, float])
_FREE = _NUMBERS | {types.FunctionType}
_NO_NAME = object()


class Form:
    """A function with masks in place of branches.

    Attributes:
        code: Its code, which takes a `Masks` first.
        count: How many arguments it takes.
        free: The names that it takes from around it.
        attributes: Those of its first argument that it reads: it is a method, then.
        truths: Whether it may compute with truths.
        below: For how many lanes it is not worth it any more.
        defined: 1 where operations are to be spared operands for which they are not defined: for what is no number,
            some take ten times as long.
        strict: Up to which kind of operands its derivatives need that sides are cut off (`Masks.only`).
        missed: How many gradients were not finite even so.
        vectors: Whether it, or a function that it calls, makes vectors of numbers.
        products: Whether it, or one of those, may multiply matrices by vectors.
    """

    __slots__ = (
        "code",
        "count",
        "free",
        "attributes",
        "truths",
        "below",
        "defined",
        "strict",
        "missed",
        "vectors",
        "products",
    )

    def __init__(self, code: types.CodeType, found: Predicated) -> None:
        self.code = code
        self.count = code.co_argcount - 1
        self.free = found.free
        self.attributes = found.attributes
        self.below: float = math.inf if found.branches <= _BRANCHES else FEW
        self.truths = found.truths
        self.defined = self.strict = int(found.defined)
        self.missed = 0
        self.vectors = found.vectors
        self.products = found.products

    def around(self, func: types.FunctionType, owner: Any) -> tuple[dict, dict] | None:
        """The numbers and tensors that the code reads from around a function, and from the one whose method it is.

        None where it reads anything else. Tensors are without derivatives where nothing is recorded.
        """
        own = dict(zip(func.__code__.co_freevars, func.__closure__ or ()))
        found = {}
        for name in self.free:
            try:
                value = own[name].cell_contents if name in own else func.__globals__.get(name, _NO_NAME)
            except ValueError:
                return None
            value = getattr(builtins, name, _NO_NAME) if value is _NO_NAME else value
            if name in _GIVEN:
                if _GIVEN[name] is not value:
                    return None
            elif isinstance(value, Tensor):
                found[name] = _unrecorded(value)
            elif type(value) is types.BuiltinFunctionType:
                if value not in ELEMENTWISE_FUNCTIONS:
                    return None
            elif type(value) not in _FREE:
                return None
        kept = {name: _unrecorded(_kept(owner, name)) for name in self.attributes}
        good = all(type(value) in _NUMBERS or isinstance(value, Tensor) for value in kept.values())
        return (found, kept) if good else None

    def function(self, func: types.FunctionType, tensors: dict[str, Tensor]) -> types.FunctionType:
        """The code as a function with the surroundings of `func`, but for tensors."""
        own = dict(zip(func.__code__.co_freevars, func.__closure__ or ()))
        around = func.__globals__
        for name, value in tensors.items():
            if name in own:
                own[name] = types.CellType(value)
            else:
                around = {**around, name: value}
        cells = tuple([own[name] for name in self.code.co_freevars])
        return types.FunctionType(self.code, around, func.__name__, None, cells)

    def bound(
        self, func: types.FunctionType, args: tuple, dims: Sequence[int | None], names: tuple[str, ...], method: bool
    ) -> tuple[tuple, Sequence[int | None]] | None:
        """An argument for each parameter but that of a method's instance, and their dims; None where one is missing.

        `names`: of the last arguments.
        """
        code = func.__code__
        parameters = code.co_varnames[method : code.co_argcount]
        if not names and len(args) == len(parameters):
            return args, dims
        count = len(args) - len(names)
        named = dict(zip(names, zip(args[count:], dims[count:])))
        defaults = func.__defaults__ or ()
        pairs = [*zip(args[:count], dims)]
        for place, name in enumerate(parameters[count:], count):
            back = place - len(parameters)
            if name in named and place + method >= code.co_posonlyargcount:
                pairs.append(named.pop(name))
            elif -back <= len(defaults):
                pairs.append((defaults[back], None))
            else:
                return None
        if named or count > len(parameters):
            return None
        return tuple([arg for arg, _ in pairs]), [dim for _, dim in pairs]

    def retry(self, strict: int) -> bool:
        """A gradient was not finite: whether it may be where more sides are cut off than with `strict`."""
        self.missed += strict == STRICTEST
        self.strict = min(strict + 1, STRICTEST)
        return strict < STRICTEST


# By code object: its form, None where there is none.
_forms: dict[types.CodeType, Form | None] = {}


def form_of(func: Any) -> Form | None:
    """The form of a function with masks, None where there is none."""
    if type(func) is not types.FunctionType:
        return None
    code = func.__code__
    if code not in _forms:
        try:
            found = predicated(definition(func))
            _forms[code] = Form(compile_definition(found.node, code), found)
        except Unsupported:
            _forms[code] = None
    return _forms[code]


class Run:
    """How a function runs with masks in one call.

    Attributes:
        form, function: What runs.
        own: Which of its arguments are different in each lane.
        size, dtype, device: The number of lanes, and of what kind these arguments are.
        wide: Whether there are vectors among the arguments.
        others: The functions that it calls.
        straight: Whether all lanes are to go one way.
    """

    __slots__ = ("form", "function", "own", "size", "dtype", "device", "wide", "others", "straight")

    def __init__(self, form: Form, own: list[bool], args: tuple, straight: bool = False) -> None:
        first = args[own.index(True)]
        self.form = form
        self.function: Callable | None = None
        self.own = own
        self.others: dict[types.FunctionType, Callable | None] = {}
        self.size, self.dtype, self.device = first.shape[0], first.dtype, first.device
        self.wide = form.vectors or any(isinstance(arg, Tensor) and arg.dim() > each for arg, each in zip(args, own))
        self.straight = straight

    def takes(self, args: tuple, func: types.FunctionType, owner: Any) -> bool:
        """Whether it can be told that masks give what lanes would that part. `owner`: whose method it is, or None."""
        around = self.form.around(func, owner)
        if around is None:
            return False
        free, kept = around
        self.wide = self.wide or any(
            isinstance(each, Tensor) and each.dim() for each in (*free.values(), *kept.values())
        )
        for arg, own in zip(args, self.own):
            if not (_plain(arg, own, self.dtype) or (not own and self.form.products and _is_matrix(arg, self.dtype))):
                return False
        if self.wide:
            # A vector would not be promoted by a number, such as the sum of one of int32, which is int64.
            if any(isinstance(arg, Tensor) and arg.dtype is not self.dtype for arg in args):
                return False
            if not self.dtype.is_floating_point and self.dtype is not torch.int64:
                return False
        kept = self._given(self.form, kept)
        function = self._function(self.form, func, free)
        if function is None or kept is None:
            return False
        if owner is None:
            self.function = function
        else:
            self.function = functools.partial(_of_owner, function, types.SimpleNamespace(**kept))
        return True

    def _function(self, form: Form, func: types.FunctionType, tensors: dict[str, Tensor]) -> Callable | None:
        """A function with masks, None where it may not be what it is in lanes."""
        if self.wide and form.truths and self.dtype not in (torch.get_default_dtype(), torch.int64):
            return None  # a truth times 1.0 is of the default dtype: a vector and a number may differ, then
        given = self._given(form, tensors)
        return None if given is None else form.function(func, given)

    def _given(self, form: Form, values: dict[str, Any]) -> dict[str, Any] | None:
        """Values that all lanes share, as a function has them. They may be tensors of the dtype of the arguments."""
        found = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                if not (_plain(value, False, self.dtype) or (form.products and _is_matrix(value, self.dtype))):
                    return None
                if not inert(value) or (value.dim() and not self.wide):
                    return None
                value = _with_rows(value, False, self.size, self.wide)
            found[name] = value
        return found

    def results(self, args: tuple, recording: bool, further: bool = False) -> tuple[tuple, bool] | None:
        """The results `[size]` or `[size, S]`, and whether they are one; None where masks do not give them.

        `further`: what torch records is differentiated more than once, or tangents are carried along.
        """
        form = self.form
        if self.wide or not all(self.own):
            args = tuple([_with_rows(arg, own, self.size, self.wide) for arg, own in zip(args, self.own)])
        masks = Masks(
            self.size,
            self.device,
            self.wide,
            int(recording) + further,
            form.strict if recording else form.defined,
            self.called,
            self.straight,
        )
        try:
            out = self.function(masks, *args)  # type: ignore[misc]
        except Lasting:
            form.below = min(form.below, self.size)
            return None
        except Failing:
            return None
        except Narrow:
            form.vectors = True  # from the next call on
            return None
        except Exception:
            # Of what fails for a lane that does not come there, the lane is to know nothing.
            if not self.straight:
                form.below = 0
            return None
        given = out if type(out) is tuple else (out,)
        if any(type(each) in (int, float) for each in given):
            return None  # all lanes have returned this number
        found = tuple([self._result(each) for each in given])
        if not found or any(each is None for each in found):
            if not self.straight:
                form.below = 0
            return None
        return found, type(out) is not tuple

    def _result(self, value: Any) -> Tensor | None:
        if type(value) is Numbers:
            values = value.values
            value = values.to(torch.get_default_dtype()) if values.is_floating_point() else values
        if not isinstance(value, Tensor) or value.dim() != 1 + self.wide or value.shape[0] != self.size:
            return None
        return value.squeeze(1).contiguous() if self.wide and value.shape[1] == 1 else value

    def called(self, func: Any, args: tuple, names: tuple[str, ...]) -> tuple[Callable, tuple] | None:
        """A function that this one calls, and an argument for each of its parameters. `names`: of the last."""
        form = form_of(func)
        if form is None or form.attributes:
            return None
        bound = form.bound(func, args, (0,) * len(args), names, False)
        if bound is None or any(dim is None and type(default) not in _NUMBERS for default, dim in zip(*bound)):
            return None
        if func not in self.others:
            around = form.around(func, None)
            self.others[func] = None if around is None else self._function(form, func, around[0])
        function = self.others[func]
        return None if function is None else (function, bound[0])

    def recorded(self, args: tuple, wanted: Sequence[int]) -> tuple[list[Tensor], tuple[tuple, bool] | None]:
        """What torch records from, in the places `wanted` of the operands, and what `results` gives."""
        operands = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
        leaves = [operands[place].requires_grad_() for place in wanted]
        with torch.enable_grad():
            return leaves, self.results(tuple(operands), True)


def with_owner(func: Any) -> tuple[Any, Any]:
    """The function of a method, or that a module runs, and whose it is; None for another function."""
    if isinstance(func, nn.Module) and type(func).__call__ is nn.Module.__call__ and not has_module_hooks(func):
        func = func.forward
    return (func.__func__, func.__self__) if type(func) is types.MethodType else (func, None)


def _of_owner(function: Callable, owner: Any, masks: Masks, *args: Any) -> Any:
    return function(masks, owner, *args)


def _kept(owner: Any, name: str) -> Any:
    """The value of an attribute that is kept in an object, or in a module as its parameter or buffer."""
    kind = type(owner)
    if kind.__getattribute__ is not object.__getattribute__ or hasattr(kind, name):
        return _NO_NAME
    kept = getattr(owner, "__dict__", {})
    places = [kept]
    if isinstance(owner, nn.Module) and kind.__getattr__ is nn.Module.__getattr__:
        places.extend([kept["_parameters"], kept["_buffers"]])
    return next((place[name] for place in places if name in place), _NO_NAME)


def _unrecorded(value: Any) -> Any:
    """A tensor without derivatives where nothing is recorded."""
    return value.detach() if isinstance(value, Tensor) and value.requires_grad and not is_grad_enabled() else value


def _with_rows(arg: Any, own: bool, size: int, wide: bool) -> Any:
    """An argument as lanes have it: numbers `[B]`; where there are vectors, `[B, 1]`, and vectors `[B, S]` or `[1, S]`.

    One of all lanes has dims, too: without them, it would not promote others.
    """
    if not isinstance(arg, Tensor):
        return arg
    if not arg.dim():
        return arg.expand(size, 1) if wide else arg.expand(size)
    if not own:
        return Matrix(arg) if arg.dim() == 2 else arg[None]
    return arg if not wide or arg.dim() == 2 else arg[:, None]


def _is_matrix(arg: Any, dtype: torch.dtype) -> bool:
    """Whether an argument that all lanes share is a matrix that makes vectors of vectors."""
    return (
        type(arg) is Tensor
        and arg.layout is torch.strided
        and not arg.is_nested
        and arg.dim() == 2
        and min(arg.shape) > 1
        and arg.dtype is dtype
        and dtype.is_floating_point
        and not (arg.is_neg() or arg.is_inference())
    )


def _plain(arg: Any, own: bool, dtype: torch.dtype) -> bool:
    """Whether an argument is a number or a vector, of each lane or for all: that one promotes as one of each would."""
    if type(arg) is not Tensor or (not own and arg.dtype is not dtype):
        return not own and type(arg) in _NUMBERS
    if arg.is_complex() or arg.is_neg() or arg.is_inference():
        return False
    return arg.dim() == own or (arg.dim() == own + 1 and arg.shape[-1] > 1 and arg.is_contiguous())
