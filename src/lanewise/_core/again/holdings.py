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

# What has no parts that could be changed; what code consists of.
_DATA = (str, bytes, int, float, complex, type(None), Tensor, torch.dtype, torch.device, torch.Size, range)
ATOMS = (*_DATA, type, types.ModuleType, types.CodeType, types.FunctionType, types.BuiltinFunctionType)
_DICTS = frozenset({dict, OrderedDict})
# Packages whose objects belong to the process, and to other threads.
_PROCESS = frozenset({"logging", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "lanewise"})


class _Unset:
    """In place of what a slot or a cell holds that was not set."""


class _Kind:
    """How to look at the objects of a type.

    Attributes:
        entries: What lists the entries of one.
        size: What counts them, or None where there are few.
        slots: Its slots.
        attributed: Whether it may have attributes or a cell.
    """

    __slots__ = ("entries", "size", "slots", "attributed")

    def __init__(self, thing: Any) -> None:
        self.entries, self.size = _entries_of(thing)
        self.slots = slots_of(type(thing))
        self.attributed = type(thing) is types.CellType or attributes_of(thing) is not None


_MOST_KINDS = 10_000
# By type: how to look at its objects; None for an atom.
_kinds: dict[type, _Kind | None] = {}


def _kind(thing: Any) -> _Kind | None:
    kind = type(thing)
    try:
        return _kinds[kind]
    except KeyError:
        try:
            process = str(kind.__module__).partition(".")[0] in _PROCESS and not isinstance(thing, threading.local)
            found = None if process or isinstance(thing, ATOMS) else _Kind(thing)
        except Exception:  # of a proxy, perhaps, which is not there now
            found = None
        if len(_kinds) >= _MOST_KINDS:  # of classes made in functions, over and over
            _kinds.clear()
        _kinds[kind] = found
        return found


def attributes_of(thing: Any) -> dict | None:
    """The attributes of an object, None where it has none."""
    read: Any = type(thing).__getattribute__
    if type(read) is not types.WrapperDescriptorType:  # the user's, which may do anything
        read = object.__getattribute__
    try:
        attributes = read(thing, "__dict__")
    except Exception:
        return None
    return attributes if type(attributes) is dict else None


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
        how: Any = _kind(thing)
        count, size = 0, room
        parts: list[Any] = []
        if how.size is None or how.size(thing) < room:
            parts = how.entries(thing)
            count = len(parts)
            parts = parts + _attributes(thing, how)
            size = len(parts)
        if size + 1 > room:
            if whole:
                return None
            continue
        room -= size + 1
        found.append((thing, count, parts))
        if size > 1:
            pending += [part for part in parts if _kinds.get(type(part), part) is not None and _kind(part) is not None]
    return found


def unchanged(before: list[Held], now: list[Held] | None) -> bool:
    """Whether objects hold what they held."""
    if now is None or len(now) != len(before):
        return False
    return all(thing is other and _same(parts, others) for (thing, _, parts), (other, _, others) in zip(before, now))


def _entries_of(thing: Any) -> tuple[Callable[[Any], list], Callable[[Any], int] | None]:
    """What lists and counts the entries of objects like one, whatever methods of their own they have for that."""
    if isinstance(thing, dict):
        plain: Any = OrderedDict if isinstance(thing, OrderedDict) else dict
        return lambda thing: [*plain.keys(thing), *plain.values(thing)], lambda thing: 2 * dict.__len__(thing)
    for kind in (list, tuple, deque):
        if isinstance(thing, kind):
            return lambda thing, each=kind.__iter__: [*each(thing)], kind.__len__
    for kind in (set, frozenset):
        if isinstance(thing, kind):
            return lambda thing, each=kind.__iter__: sorted(each(thing), key=id), kind.__len__
    if isinstance(thing, bytearray):
        return lambda thing: [bytes(thing)], bytearray.__len__
    if isinstance(thing, array.array):
        return lambda thing: [thing.tobytes()], array.array.__len__
    if numpy is not None and isinstance(thing, numpy.ndarray):
        return lambda thing: [] if thing.dtype.hasobject else [thing.tobytes()], lambda thing: thing.size
    if isinstance(thing, contextvars.ContextVar):
        return _in_context, None
    if isinstance(thing, (io.StringIO, io.BytesIO)):
        return lambda thing: [] if thing.closed else [thing.getvalue(), thing.tell()], None
    return lambda thing: [], None


def _in_context(thing: Any) -> list:
    """What a context variable stands for, if anything."""
    try:
        return [thing.get()]
    except LookupError:
        return []


def _attributes(thing: Any, how: _Kind) -> list:
    """The type of an object, what its slots and its cell hold, the names of its attributes and then their values."""
    parts: list[Any] = [type(thing)]
    if how.slots:
        parts += [held(slot, thing) for slot in how.slots]
    if not how.attributed:
        return parts
    if type(thing) is types.CellType:
        try:
            parts.append(thing.cell_contents)
        except ValueError:
            parts.append(_Unset)
    attributes = attributes_of(thing)
    if attributes is not None:
        parts += attributes.keys()
        parts += attributes.values()
    return parts


def slots_of(kind: type) -> list[types.MemberDescriptorType]:
    """The slots of a class."""
    found = []
    for base in kind.__mro__:
        if "__slots__" in base.__dict__:
            found += [slot for slot in base.__dict__.values() if type(slot) is types.MemberDescriptorType]
    return found


def held(slot: types.MemberDescriptorType, thing: Any) -> Any:
    """What a slot of an object holds."""
    try:
        return slot.__get__(thing)
    except AttributeError:
        return _Unset


def put_back(before: Held) -> None:
    """Make an object hold what it held, whatever methods of its own it has for that."""
    thing, size, parts = before
    entries, kind, rest = parts[:size], parts[size], parts[size + 1 :]
    how: Any = _kind(thing)
    if (size or how.size is not None) and not _same(now := how.entries(thing), entries):
        _refill(thing, entries, now)
    if type(thing) is kind and _same(_attributes(thing, how), parts[size:]):
        return
    slots = slots_of(kind)
    if type(thing) is not kind:
        thing.__class__ = kind
    for slot, value in zip(slots, rest, strict=False):
        if held(slot, thing) is value:
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
    attributes = attributes_of(thing)
    if attributes is not None:
        half = len(rest) // 2
        attributes.clear()
        attributes.update(zip(rest[:half], rest[half:], strict=True))


def _refill(thing: Any, entries: list, now: list) -> None:
    if isinstance(thing, dict):
        plain: Any = OrderedDict if isinstance(thing, OrderedDict) else dict
        half = len(entries) // 2
        plain.clear(thing)
        for key, value in zip(entries[:half], entries[half:], strict=True):
            plain.__setitem__(thing, key, value)
    elif isinstance(thing, list):
        list.__setitem__(thing, slice(None), entries)
    elif isinstance(thing, set):
        # Only what differs: the order of the others stays.
        kept = set(map(id, entries))
        set.difference_update(thing, [entry for entry in now if id(entry) not in kept])
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
