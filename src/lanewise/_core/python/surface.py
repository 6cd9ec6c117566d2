"""What a wrapper answers when Python asks it something: its value, its memory, its text, a copy.

A value that is the same in all lanes answers as a plain tensor would, and so does the primal of a dual tensor. Lane
values have no single answer: the error names the line and what to write instead.
"""

import copy
import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor

from lanewise._core.batch import BatchTensor
from lanewise._core.dual import DualTensor
from lanewise._core.level import current_level, note_autograd, on_plane
from lanewise._core.parting.joins import can_settle, given_to_running, innermost, rows_of, settle, share_no_attribute
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.unasked import note_question
from lanewise._core.plane import (
    CUT,
    Plane,
    cut,
    detached,
    escaped,
    is_lazy_conjugate,
    own_node,
    recorded,
    sync,
    tracked,
)
from lanewise._core.python.arrays import hand_out
from lanewise._core.python.floats import check_float
from lanewise._core.python.plain_data import from_around, set_data
from lanewise._core.python.subscripts import get_item, set_item
from lanewise._core.recording.autograd import begin_history, retaining
from lanewise._core.recording.saved import packing, saving
from lanewise._core.recording.tensor_hooks import set_hook
from lanewise._torch_compat import current_graph_task_id, set_grad_enabled
from lanewise.errors import LaneValueError, TransformError, at_user_line

aten = torch.ops.aten

_ITEM = (
    "It looks like you're calling .item on a Tensor",
    "torch.where(x > 0, a, b)  # in place of a choice by a Python number\n"
    "x[index]                  # a tensor may be an index, a tensor may be a factor: leave it a tensor",
)
_BOOL = (
    "attempting to use a Tensor in some data-dependent control flow",
    "torch.where(condition, a, b)  # in place of: a if condition else b",
)
_MEMORY = (
    "Cannot access data pointer of Tensor that doesn't have storage",
    "return the tensor, and ask for its memory outside the mapped function",
)
_STORAGE = (
    "Cannot access storage of a tensor with lanes",
    "return the tensor, and ask for its storage outside the mapped function",
)
_NUMPY = (
    "Cannot access data pointer of Tensor that doesn't have storage",
    "torch.sin(x)  # torch's functions in place of NumPy's\n"
    "or return the tensor, and call .numpy() outside the mapped function",
)
_TEXT = ("the text is used, so each lane needs its own", 'print(f"{x}")  # what is only shown may tell of all lanes')
_TOLIST = ("It looks like you're calling .item on a Tensor (tolist)", "x.unbind()  # a tuple of tensors")
_PICKLE = (
    "Cannot access storage of a tensor with lanes",
    "return the tensor, and save it outside the mapped function",
)


class _Asking:
    """Whether the text that a frame asks for is used, not shown, which texts.py, further up, knows."""

    is_used: Callable[[FrameType], bool] = staticmethod(lambda frame: False)


asking = _Asking()


class Surface:
    """Methods given to every wrapper: what Python asks for that is no tensor of its plane."""

    value: Any
    level: Any

    def _answer(self, question: str, why: tuple[str, str], ask: Any = None) -> Any:
        """The tensor below that answers for this one; raises where the lanes differ."""
        self._check_alive(question)
        answering = standing(self)
        if answering is None and ask is not None:
            answering = ask(self)
        if answering is None:
            phrase, instead = why
            raise LaneValueError(
                at_user_line(
                    f"vmap: {question}: {phrase}: its value {list(self.shape)} differs from lane to lane "  # type: ignore[attr-defined]
                    f"({self.level!r})",
                    instead,
                )
            )
        return answering

    def _check_alive(self, question: str) -> None:
        if self.level.alive or current_graph_task_id() != -1:
            return
        sync(self)  # type: ignore[arg-type]
        if self.level.lifted(self):
            raise escaped(self.level, question)

    # --- numbers ---------------------------------------------------------------------------------------------------

    def item(self) -> Any:
        """The number, where it is the same in all lanes."""
        return self._answer("item()", _ITEM, agreed).item()

    def tolist(self) -> Any:
        """Nested lists of numbers."""
        return self._answer("tolist()", _TOLIST, agreed).tolist()

    def __bool__(self) -> bool:
        return bool(self._answer("bool()", _BOOL, agreed))

    def __int__(self) -> int:
        return int(self._answer("int()", _ITEM, agreed))

    def __float__(self) -> float:
        check_float(self)  # type: ignore[arg-type]
        return float(self._answer("float()", _ITEM, agreed))

    def __complex__(self) -> complex:
        return complex(self._answer("complex()", _ITEM, agreed))

    def __index__(self) -> int:
        return self._answer("index", _ITEM, agreed).__index__()

    # --- subscripts ------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Tensor:
        return get_item(self, index)  # type: ignore[arg-type]

    def __setitem__(self, index: Any, value: Any) -> None:
        set_item(self, index, value)  # type: ignore[arg-type]

    def resolve_conj(self) -> Tensor:
        """A copy of a lazy conjugate, which the wrapper does not show."""
        return self.clone() if is_lazy_conjugate(self) else self  # type: ignore[attr-defined,return-value]

    # --- memory ----------------------------------------------------------------------------------------------------

    def numpy(self, *, force: bool = False) -> Any:
        """A NumPy array; where it has lanes, those that agree on it go on together."""
        self._check_alive("numpy()")
        tangent = getattr(self, "tangent", None)
        if (tracked(self) or tangent is not None) and not force:  # type: ignore[attr-defined]
            raise TransformError(
                at_user_line(
                    "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.",
                    "x.detach().numpy()",
                )
            )
        array = self._answer("numpy()", _NUMPY, agreed).numpy(force=force)
        return array if standing(self) is not None else hand_out(array, self)

    def __array__(self, dtype: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self._answer("data_ptr()", _MEMORY).data_ptr()

    def untyped_storage(self) -> Any:
        """The storage."""
        return self._answer("untyped_storage()", _STORAGE).untyped_storage()

    def storage(self) -> Any:
        """The typed storage."""
        return self._answer("storage()", _STORAGE).storage()

    def __dlpack__(self, **options: Any) -> Any:
        return self._answer("__dlpack__()", _MEMORY).__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._answer("__dlpack_device__()", _MEMORY).__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> Any:
        return self._answer("__cuda_array_interface__", _MEMORY).__cuda_array_interface__

    def share_memory_(self) -> Any:
        """Refused: memory shared between processes has no lanes."""
        raise TransformError(
            at_user_line(
                f"share_memory_(): Cannot access storage of a tensor inside {self.level!r}",
                "xs.share_memory_()  # outside, before the transformed function is called",
            )
        )

    def is_shared(self) -> bool:
        """Whether the memory is shared between processes."""
        return False

    # --- copies ----------------------------------------------------------------------------------------------------

    def __copy__(self) -> Any:
        return self.detach().requires_grad_(recorded(self))  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf or tracked(self.value):  # type: ignore[attr-defined]
            raise TransformError(
                at_user_line(
                    "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                    "moment: this one has a history that a copy would lose",
                    "copy.deepcopy(x.detach())",
                )
            )
        twin = self.detach().clone().requires_grad_(recorded(self))  # type: ignore[attr-defined]
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._answer("pickle", _PICKLE).__reduce_ex__(protocol)

    def as_subclass(self, cls: Any) -> Any:
        """The wrapper itself: torch makes of what comes of a captured tensor of a subclass one of that class."""
        return self

    # --- cutting ---------------------------------------------------------------------------------------------------

    def detach(self) -> Any:
        """Without history on any plane, and without a tangent; the memory is shared."""
        if packing.now:
            return _torch_detach(self)  # type: ignore[arg-type]
        return _cut_below(self, _torch_detach(self), self.level.below(cut, self.value))  # type: ignore[arg-type]

    def detach_(self) -> Any:
        """`detach` in place."""
        return _cut_below(self, Tensor.detach_(self), self.level.below(cut, self.value))  # type: ignore[arg-type]

    # --- history ---------------------------------------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        """Whether autograd records the tensor, on its plane or on one below; from then on, on both."""
        if recorded(self):  # type: ignore[arg-type]
            return True
        if not tracked(self):
            return False
        begin_history(self)
        return True

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        self.requires_grad_(flag)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Record the tensor on its plane from here on; no longer, if it is a leaf of that."""
        if not requires_grad and _is_tracked_below(self):
            note_autograd()
            begin_history(self)
        return Tensor.requires_grad_(self, requires_grad)  # type: ignore[arg-type]

    @property
    def is_leaf(self) -> bool:
        """Whether the tensor has no history; what was given to the function with one, has one inside, too."""
        if not self.level.grad_mode or not _is_tracked_below(self):
            return Tensor.is_leaf.__get__(self)  # type: ignore[attr-defined]
        note_autograd()
        return False

    @property
    def grad(self) -> Tensor | None:
        """The gradient of a leaf: None in lanes that have none yet, which go apart from those that have."""
        found: Any = Tensor.grad.__get__(self)  # type: ignore[attr-defined]
        return found if found is None or given_to_running(found) else None

    @grad.setter
    def grad(self, new: Tensor | None) -> None:
        share_no_attribute(self)
        Tensor.grad.__set__(self, new)  # type: ignore[attr-defined]

    @grad.deleter
    def grad(self) -> None:
        share_no_attribute(self)
        Tensor.grad.__set__(self, None)  # type: ignore[attr-defined]

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Call `hook` with each gradient of the tensor, on whichever plane it is computed."""
        return set_hook(self, hook)  # type: ignore[arg-type]

    def retain_grad(self) -> None:
        """Keep the gradient of a tensor that is no leaf, on its plane."""
        if _is_tracked_below(self):
            raise TransformError(
                at_user_line(
                    f"attempting to call Tensor.retain_grad() inside of a function being transformed: the tensor is "
                    f"tracked only outside of {self.level!r}",
                    "x = x.requires_grad_()  # first thing in the function, for the argument it is computed from",
                )
            )
        retaining.add(self.level)
        Tensor.retain_grad(self)  # type: ignore[arg-type]

    @property
    def data(self) -> Any:
        """As `detach`, and autograd does not notice writes to it."""
        return _cut_below(self, self.level.alias(self), self.value.data)

    @data.setter
    def data(self, new: Tensor) -> None:
        level = self.level
        new = from_around(self, new)
        way = _way_from(self, new)
        if way is not None and all(op is aten.detach.default for op in way):
            return
        own = new if way is None and level.owns(new) else level.adopt(new if way is None else new.value)  # type: ignore[attr-defined]
        set_data(self, own)

    # --- text ------------------------------------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        if self.level.alive and asking.is_used(sys._getframe(1)):
            return text_of_one(self, None)
        return self._told()

    __str__ = __repr__

    def _told(self) -> str:
        """What the wrapper is, with all its lanes."""
        grad_mode = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            with on_plane(None):
                parts = _describe(self)
        finally:
            set_grad_enabled(grad_mode)
        if not self.level.alive:
            parts.append("ended=True")
        if (node := own_node(self)) is not None:  # type: ignore[arg-type]
            parts.append(f"grad_fn=<{type(node).__name__}>")
        elif recorded(self):  # type: ignore[arg-type]
            parts.append("requires_grad=True")
        return f"{type(self).__name__}({', '.join(parts)})"

    def __format__(self, spec: str) -> str:
        if self.level.alive and asking.is_used(sys._getframe(1)):
            return text_of_one(self, spec)
        if not spec or self.dim():  # type: ignore[attr-defined]
            return format(self._told(), spec)
        answering = standing(self)
        lanes = self.value.detach() if answering is not None else self.level.here(self).value.detach()
        with on_plane(None):
            if answering is not None:
                return format(answering, spec)
            texts = [format(lane, spec) for lane in lanes]
        return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _is_tracked_below(wrapper: Any) -> bool:
    """Whether autograd records a tensor on a plane below, and not on its own."""
    return not recorded(wrapper) and tracked(wrapper)


def _way_from(wrapper: Any, alias: Any) -> list | None:
    """The operations by which an alias takes its values from a wrapper, outermost first; None where it does not."""
    way = []
    while alias is not wrapper:
        if not isinstance(alias, Plane) or alias.level.lifted(alias) or not alias.origin:
            return None
        way.append(alias.origin[1])
        alias = alias.origin[0]
    return way


def standing(wrapper: Any) -> Tensor | None:
    """The tensor below that stands for a wrapper, None where it has lanes."""
    sync(wrapper)
    return None if isinstance(wrapper, BatchTensor) and wrapper.mapped else wrapper.value


def agreed(wrapper: Any) -> Tensor | None:
    """The tensor below that answers for all lanes that run, None where they differ and cannot part."""
    answering = standing(wrapper)
    if answering is not None:
        return answering
    note_question(wrapper.level)
    level = innermost(wrapper.level)
    here = level.here(wrapper) if isinstance(level, LaneLevel) and level.alive else wrapper
    return settle(level, here) if can_settle(level) else level.below(_first_if_same, here.value)


def _first_if_same(value: Tensor) -> Tensor | None:
    value = cut(value)
    if value.shape[0] == 0:
        return value.new_zeros(value.shape[1:])
    first = value[0]
    same = (value == first) | ((value != value) & (first != first))
    return first if bool(same.all()) else None


def _cut_below(wrapper: Any, fresh: Any, value: Tensor) -> Any:
    """`fresh`, an alias on this plane, given a value without history on the planes below."""
    if isinstance(wrapper, DualTensor):
        fresh.tangent, fresh.origin = None, None
    elif not wrapper.level.lifted(wrapper) and fresh is not wrapper:
        # A lane value written into the alias must reach the tensor itself.
        fresh.origin = (wrapper, aten.detach.default, (), {}, CUT)
    fresh.value = value
    return fresh


def _describe(wrapper: Any) -> list[str]:
    level = wrapper.level
    parts = [f"level={level.order}"]
    if isinstance(wrapper, BatchTensor):
        parts.append(f"lanes={level.size}" if wrapper.mapped else f"the same in all {level.size} lanes")
        return [*parts, f"value={_text(wrapper.value)}"]
    if not isinstance(wrapper, DualTensor):
        return [*parts, f"value={_text(wrapper.value)}"]
    parts.append(f"primal={_text(wrapper.value)}")
    return [*parts, f"tangent={'0' if wrapper.tangent is None else _text(wrapper.tangent)}"]


def _text(value: Tensor) -> str:
    return repr(value if isinstance(value, Plane) else value.detach())


def text_of_one(wrapper: Any, spec: str | None) -> str:
    """The text of a tensor in each lane, as a loop over the lanes has it; `spec` is None for that of `repr`."""
    value = wrapper
    while isinstance(value, Plane):
        level = value.level if standing(value) is None else None
        if spec is not None and not value.dim() and level is not None and can_settle(level):
            return _number_text(innermost(level), value, spec)
        value = value._answer("text", _TEXT, agreed)  # type: ignore[attr-defined]
    with on_plane(None):
        value = detached(value)
        return repr(value) if spec is None else format(value, spec)


def _number_text(level: Any, value: Any, spec: str) -> str:
    """The text of a number: lanes in which it is the same go on together."""
    note_question(value.level)
    numbers = rows_of(level, value)
    places: dict[str, int] = {}
    with on_plane(None):
        if not numbers.shape[0]:
            return format(numbers.new_zeros(()), spec)
        rows = torch.tensor([places.setdefault(format(number, spec), len(places)) for number in numbers.tolist()])
    return list(places)[int(settle(level, level.wrap(rows)))]


_torch_detach: Any = Tensor.detach


@functools.wraps(_torch_detach)
def _detach_plain(self: Tensor) -> Tensor:
    """`Tensor.detach` of a plain tensor. Inside a transformed function the result belongs to it.

    A leaf made from it is then a leaf of each lane. Nothing may be written into it that the plain tensor cannot hold.
    """
    if isinstance(self, Plane):  # a function mode, such as that of a default device, leads torch's own back here
        return self.detach()
    alias = _torch_detach(self)
    level = current_level()
    if level is None or saving() or isinstance(alias, Plane):
        return alias
    return level.adopt(alias, (self, aten.detach.default, (), {}, None))


_torch_deepcopy: Any = Tensor.__deepcopy__


@functools.wraps(_torch_deepcopy)
def _deepcopy_plain(self: Tensor, memo: dict) -> Tensor:
    """`deepcopy` of a plain tensor. Inside a transformed function the copy belongs to it, as all that is made there."""
    level = current_level()
    if level is None or type(self) is not Tensor or id(self) in memo or self.layout is not torch.strided:
        return _torch_deepcopy(self, memo)
    with on_plane(None):
        plain = _torch_deepcopy(self, memo)
        alias = _torch_detach(plain)
    twin = level.adopt(alias).requires_grad_(plain.requires_grad)
    twin.__dict__.update(plain.__dict__)
    if plain.grad is not None:
        twin.grad = level.adopt(plain.grad)
    memo[id(self)] = twin
    return twin


_torch_to_dlpack = torch.utils.dlpack.to_dlpack  # type: ignore[attr-defined]


@functools.wraps(_torch_to_dlpack)
def _to_dlpack(tensor: Any) -> Any:
    """`to_dlpack`, which would hand out the address of a wrapper's missing memory."""
    return tensor.__dlpack__() if isinstance(tensor, Plane) else _torch_to_dlpack(tensor)


Tensor.detach = _detach_plain  # type: ignore[method-assign]
Tensor.__deepcopy__ = _deepcopy_plain  # type: ignore[method-assign]
torch.utils.dlpack.to_dlpack = torch.to_dlpack = _to_dlpack  # type: ignore[attr-defined]

for _name, _method in list(vars(Surface).items()):
    if _name not in ("__module__", "__doc__", "__dict__", "__weakref__", "__annotations__"):
        setattr(Plane, _name, _method)
