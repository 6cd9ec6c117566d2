"""Values that lanes came together in, while what some of these lanes had before lives on under another name.

`c = a if x > 0 else b` gives those lanes the very tensor or list `a`; the merged one is another. A write to either
would be missing in the other, so it makes the `vmap` start again and run the function as it was written.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from lanewise._core.parting.lanes import Restart
from lanewise._core.plane import Plane
from lanewise._torch_compat import StorageWeakRef

# So many pieces of memory are known before those out of use are dropped.
_MANY = 256


class Aliases:
    """Which memory stands for which other, by the address.

    Attributes:
        partners: By the address of memory: the memory, and the addresses of other that holds the same value.
        containers: Lists and dicts by their id, and the ids of those that hold the same entries.
    """

    __slots__ = ("partners", "containers")

    def __init__(self) -> None:
        self.partners: dict[int, tuple[StorageWeakRef, set[int]]] = {}
        self.containers: dict[int, tuple[Any, list[int]]] = {}

    def join(self, merged: Tensor, sources: list[Tensor]) -> None:
        """`merged` holds the values of `sources` from now on."""
        storages = {storage.data_ptr(): storage for storage in map(_storage, sources)}
        whole = _storage(merged)
        if len(self.partners) > _MANY:
            self.partners = {place: pair for place, pair in self.partners.items() if not pair[0].expired()}
        target = whole.data_ptr()
        own = self._of(target, whole)
        for place, storage in storages.items():
            other = self._of(place, storage)
            # A view of the source, merged before, was a view of what is merged now.
            for sibling in self._living(place, other[1]):
                if sibling != target:
                    self.partners[sibling][1].add(target)
                    own[1].add(sibling)
            own[1].add(place)
            other[1].add(target)

    def _of(self, place: int, storage: torch.UntypedStorage) -> tuple[StorageWeakRef, set[int]]:
        known = self.partners.get(place)
        if known is None or known[0].expired():
            known = self.partners[place] = StorageWeakRef(storage), set()
        return known

    def _living(self, place: int, partners: set[int]) -> set[int]:
        """The partners of the memory at an address whose own memory is still in use; the others are forgotten."""
        gone = set()
        for other in partners:
            known = self.partners.get(other)
            if known is None or place not in known[1] or known[0].expired():
                gone.add(other)
        partners -= gone
        return partners.copy()

    def is_shared(self, place: int) -> bool:
        """Whether other memory is in use that holds the same value as that at an address."""
        known = self.partners.get(place)
        return known is not None and not known[0].expired() and bool(self._living(place, known[1]))

    def check(self, level: Any, place: int) -> None:
        """Before a write to the memory at an address."""
        if self.is_shared(place):
            raise Restart(level)

    def join_containers(self, merged: Any, sources: list[Any]) -> None:
        """`merged` holds the entries of `sources` from now on."""
        if len(self.containers) > _MANY:
            self.containers = {key: pair for key, pair in self.containers.items() if sys.getrefcount(pair[0]) > 2}
        self.containers[id(merged)] = merged, [id(source) for source in sources]
        for source in sources:
            self.containers.setdefault(id(source), (source, []))[1].append(id(merged))

    def check_container(self, level: Any, container: Any) -> None:
        """Before a list or a dict is changed."""
        for key in self.containers.get(id(container), (None, ()))[1]:
            known = self.containers.get(key)
            # Nobody else knows it: the one reference is here, and that of the question.
            if known is not None and sys.getrefcount(known[0]) > 2:
                raise Restart(level)


def aliases_of(level: Any) -> Aliases:
    """The record of a level, begun where there is none."""
    if level.aliases is None:
        level.aliases = Aliases()
    return level.aliases


def _storage(value: Any) -> torch.UntypedStorage:
    while isinstance(value, Plane):
        value = value.value
    return value.untyped_storage()
