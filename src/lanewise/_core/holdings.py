"""What objects hold: looked at, compared with what they hold later, and put back."""

import array
import contextvars
import io
import operator
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

try:
    import numpy
except ImportError:  # torch does without it, and so do we
    numpy = None

# Arrays of more than that are not looked at.
_MOST_BYTES = 65_536
# What has no parts that could be changed; what code consists of.
_DATA = (str, bytes, int, float, complex, type(None), Tensor, torch.dtype, torch.device, torch.Size, range)
ATOMS = (*_DATA, type, types.ModuleType, types.CodeType, types.FunctionType, types.BuiltinFunctionType)


_DICTS = frozenset({dict, OrderedDict})
# Packages whose objects belong to the process, and to other threads.
_PROCESS = frozenset({"logging", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "lanewise"})


class _Unset:
    """In place of what a slot or a cell holds that was not set."""


# By type: what lists the entries of an object, its slots, and whether it may have attributes; None for an atom.
_kinds: dict[type, "tuple[Callable, list, bool] | None"] = {}


def _kind(thing: Any) -> "tuple[Callable, list, bool] | None":
    kind = type(thing)
    try:
        return _kinds[kind]
    except KeyError:
        process = kind.__module__.partition(".")[0] in _PROCESS and not isinstance(thing, threading.local)
        atom = process or isinstance(thing, ATOMS)
        found = None if atom else (_lister(thing), _slots(kind), kind is types.CellType or hasattr(thing, "__dict__"))
        _kinds[kind] = found
        return found


Held = tuple[Any, int, list]


def look(things: Iterable[Any], most: int, whole: bool = True) -> list[Held] | None:
    """Objects and all below them, the nearest first: each one, how many entries it has, and its parts.

    Where they have more than `most` parts: None if `whole`, else what was found so far.
    """
    found: list[Held] = []
    seen: set[int] = set()
    pending = [thing for thing in things if _kind(thing) is not None]
    room = most
    for thing in pending:  # which grows on the way
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        kind = type(thing)
        if kind in _DICTS and not thing:  # such as the hooks of a module: many
            found.append((thing, 0, [kind]))
            room -= 2
            continue
        if kind is dict:
            entries = [*thing, *thing.values()]
            parts = [*entries, dict]
        elif kind is list:
            entries = thing
            parts = [*thing, list]
        else:
            lister, slots, attributed = _kind(thing)  # type: ignore[misc]
            entries = lister(thing)
            parts = [*entries, *_attributes(thing, slots, attributed)]
        size = len(parts)
        if size + 1 > room:
            if whole:
                return None
            continue
        room -= size + 1
        found.append((thing, len(entries), parts))
        if size > 1:
            pending += [part for part in parts if _kinds.get(type(part), part) is not None and _kind(part) is not None]
    return found


def unchanged(before: list[Held], now: list[Held] | None) -> bool:
    """Whether objects hold what they held."""
    if now is None or len(now) != len(before):
        return False
    return all(thing is other and _same(parts, others) for (thing, _, parts), (other, _, others) in zip(before, now))


def _lister(thing: Any) -> Callable[[Any], list]:
    """What lists the entries of containers of a type, whatever methods of their own they have for that."""
    if isinstance(thing, dict):
        plain: Any = OrderedDict if isinstance(thing, OrderedDict) else dict
        return lambda thing: [*plain.keys(thing), *plain.values(thing)]
    for kind in (list, tuple, deque):
        if isinstance(thing, kind):
            return lambda thing, each=kind.__iter__: [*each(thing)]
    for kind in (set, frozenset):
        if isinstance(thing, kind):
            return lambda thing, each=kind.__iter__: sorted(each(thing), key=id)
    if isinstance(thing, bytearray):
        return lambda thing: [bytes(thing)]
    if isinstance(thing, array.array):
        return lambda thing: [thing.tobytes()]
    if numpy is not None and isinstance(thing, numpy.ndarray):
        return lambda thing: [thing.tobytes()] if thing.nbytes <= _MOST_BYTES and not thing.dtype.hasobject else []
    if isinstance(thing, contextvars.ContextVar):
        return _in_context
    if isinstance(thing, (io.StringIO, io.BytesIO)):
        return lambda thing: [] if thing.closed else [thing.getvalue(), thing.tell()]
    return lambda thing: []


def _in_context(thing: Any) -> list:
    """What a context variable stands for, if anything."""
    try:
        return [thing.get()]
    except LookupError:
        return []


def _attributes(thing: Any, slots: list, attributed: bool) -> list:
    """The type of an object, what its slots and its cell hold, the names of its attributes and then their values.

    `attributed`: whether it may have attributes or a cell.
    """
    parts: list[Any] = [type(thing)]
    if slots:
        parts += [_held(slot, thing) for slot in slots]
    if not attributed:
        return parts
    if type(thing) is types.CellType:
        try:
            parts.append(thing.cell_contents)
        except ValueError:
            parts.append(_Unset)
    attributes = getattr(thing, "__dict__", None)
    if type(attributes) is dict:
        parts += attributes.keys()
        parts += attributes.values()
    return parts


def _slots(kind: type) -> list[types.MemberDescriptorType]:
    found = []
    for base in kind.__mro__:
        if "__slots__" in base.__dict__:
            found += [slot for slot in base.__dict__.values() if type(slot) is types.MemberDescriptorType]
    return found


def _held(slot: types.MemberDescriptorType, thing: Any) -> Any:
    try:
        return slot.__get__(thing)
    except AttributeError:
        return _Unset


def put_back(held: Held) -> None:
    """Make an object hold what it held, whatever methods of its own it has for that."""
    thing, size, parts = held
    entries, kind, rest = parts[:size], parts[size], parts[size + 1 :]
    lister: Any = _lister(thing)
    if size or lister(thing):
        if not _same(lister(thing), entries):
            _refill(thing, entries)
    if type(thing) is kind and _same(_attributes(thing, *_kinds[kind][1:]), parts[size:]):  # type: ignore[index]
        return
    slots = _slots(kind)
    if type(thing) is not kind:
        thing.__class__ = kind
    for slot, value in zip(slots, rest, strict=False):
        if _held(slot, thing) is value:
            continue
        if value is _Unset:
            slot.__delete__(thing)
        else:
            slot.__set__(thing, value)
    rest = rest[len(slots) :]
    if type(thing) is types.CellType:
        if rest[0] is _Unset:
            del thing.cell_contents
        else:
            thing.cell_contents = rest[0]
        return
    attributes = getattr(thing, "__dict__", None)
    if type(attributes) is dict:
        half = len(rest) // 2
        attributes.clear()
        attributes.update(zip(rest[:half], rest[half:], strict=True))


def _refill(thing: Any, entries: list) -> None:
    if isinstance(thing, dict):
        plain: Any = OrderedDict if isinstance(thing, OrderedDict) else dict
        half = len(entries) // 2
        plain.clear(thing)
        for key, value in zip(entries[:half], entries[half:], strict=True):
            plain.__setitem__(thing, key, value)
    elif isinstance(thing, list):
        list.__setitem__(thing, slice(None), entries)
    elif isinstance(thing, set):
        set.clear(thing)
        set.update(thing, entries)
    elif isinstance(thing, deque):
        deque.clear(thing)
        deque.extend(thing, entries)
    elif isinstance(thing, bytearray):
        thing[:] = entries[0]
    elif isinstance(thing, array.array):
        del thing[:]
        thing.frombytes(entries[0])
    elif numpy is not None and isinstance(thing, numpy.ndarray) and entries:
        thing[...] = numpy.frombuffer(entries[0], thing.dtype).reshape(thing.shape)
    elif isinstance(thing, contextvars.ContextVar) and entries:
        thing.set(entries[0])
    elif isinstance(thing, (io.StringIO, io.BytesIO)):
        text, place = entries
        thing.seek(0)
        thing.truncate()
        thing.write(text)
        thing.seek(place)


def _same(parts: list, others: list) -> bool:
    if len(parts) != len(others):
        return False
    # (What a stream holds is a new text each time that one asks.)
    return all(map(operator.is_, parts, others)) or all(
        a is b or (type(a) in (str, bytes, int) and type(a) is type(b) and a == b) for a, b in zip(parts, others)
    )
