"""The directions along which a Jacobian is computed, and the blocks that its rows or columns make."""

from typing import Any

import torch
from torch import Tensor

from lanewise._core.plane import Plane
from lanewise._torch_compat import FACTORY_KEY_SET, ExcludeDispatchKeyGuard
from lanewise._transforms.arguments import Site, call_of
from lanewise.errors import TransformError, at_user_line


class Basis:
    """One-hot directions for the numbers of some tensors, `[total, *S]` for each tensor `[*S]`.

    A tensor of n numbers has n directions, and n more along the imaginary axis where `twice` says so.
    """

    __slots__ = ("tensors", "twice", "counts", "total")

    def __init__(self, tensors: list[Tensor], twice: list[bool]) -> None:
        self.tensors = tensors
        self.twice = twice
        self.counts = [t.numel() * (2 if both else 1) for t, both in zip(tensors, twice)]
        self.total = sum(self.counts)

    def rows(self, start: int, length: int) -> list[Tensor]:
        """Directions `start ... start + length` for each tensor, `[length, *S]`, plain tensors on every plane."""
        with ExcludeDispatchKeyGuard(FACTORY_KEY_SET):
            if len(self.tensors) == 1 and not self.twice[0] and length == self.total:
                only = self.tensors[0]
                rows = torch.eye(length, dtype=only.dtype, device=only.device).view(length, *only.shape)
                return [_distributed_as(only, rows)]
            offset = 0
            found = []
            for tensor, both, count in zip(self.tensors, self.twice, self.counts):
                n = tensor.numel()
                rows = torch.zeros((length, n), dtype=tensor.dtype, device=tensor.device)
                for first, value in ((offset, 1), (offset + n, 1j)) if both else ((offset, 1),):
                    if -length < start - first < n:
                        rows.diagonal(start - first).fill_(value)
                found.append(_distributed_as(tensor, rows.view(length, *tensor.shape)))
                offset += count
        return found

    def only(self) -> list[Tensor]:
        """The direction of the only tensor, which has one number, `[*S]`: a plain tensor on every plane."""
        (tensor,) = self.tensors
        with ExcludeDispatchKeyGuard(FACTORY_KEY_SET):
            return [_distributed_as(tensor, torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device))]


def _distributed_as(tensor: Any, rows: Tensor) -> Tensor:
    """Directions on every device of the mesh that a DTensor lies on: it meets no plain tensors."""
    while isinstance(tensor, Plane):
        tensor = tensor.value
    mesh = None if type(tensor) is Tensor else getattr(tensor, "device_mesh", None)
    kind: Any = type(tensor)
    return rows if mesh is None else kind.from_local(rows, mesh, run_check=False)


def of_reverse(site: Site, column: Tensor, x: Tensor, basis: Basis) -> list[Tensor]:
    """`[total, *x]`, or `[*x]` of one number, -> the Jacobian `[*y, *x]` of each output y."""
    if len(basis.tensors) == 1 and not basis.twice[0]:
        shape = (*basis.tensors[0].shape, *x.shape)
        # A view that is none would be one more operation for each derivative that is taken of it.
        return [column if column.shape == shape else column.reshape(shape)]
    blocks = []
    for rows, y, both in zip(column.split(basis.counts), basis.tensors, basis.twice):
        if both:
            # With cotangents v, a backward pass gives conj(J_z) v + J_zbar conj(v).
            along_1, along_i = rows[: y.numel()], rows[y.numel() :]
            if x.is_complex():
                check_holomorphic(site, along_1 + 1j * along_i, along_1)
                rows = ((along_1 - 1j * along_i) / 2).conj()
            else:
                rows = torch.complex(along_1, along_i)
        blocks.append(rows.reshape((*y.shape, *x.shape)))
    return blocks


def of_forward(site: Site, row: Tensor, basis: Basis) -> list[Tensor]:
    """`[total, *y]` -> the Jacobian `[*y, *x]` with respect to each input x."""
    if len(basis.tensors) == 1 and not basis.twice[0]:
        return [row.movedim(0, -1).reshape((*row.shape[1:], *basis.tensors[0].shape))]
    blocks = []
    for part, x, both in zip(row.split(basis.counts), basis.tensors, basis.twice):
        if both:
            # Along a direction v, a forward pass gives J_z v + J_zbar conj(v).
            along_1, along_i = part[: x.numel()], part[x.numel() :]
            if part.is_complex():
                check_holomorphic(site, along_1 + 1j * along_i, along_1)
                part = (along_1 - 1j * along_i) / 2
            else:
                part = torch.complex(along_1, along_i)
        blocks.append(part.movedim(0, -1).reshape((*part.shape[1:], *x.shape)))
    return blocks


def check_holomorphic(site: Site, twice_along_conj: Tensor, scale: Tensor) -> None:
    """Raise where the derivative along the conjugate is not zero. On lanes, where no value can be asked, it is not."""
    if isinstance(twice_along_conj, Plane) or twice_along_conj.device.type == "meta" or not scale.numel():
        return
    off, size = twice_along_conj.detach().abs().max(), scale.detach().abs().max()
    if off > size * torch.finfo(scale.dtype).eps ** 0.5:
        call = call_of(site)
        raise TransformError(
            at_user_line(
                f"{call}: the function is complex but not holomorphic: its derivative depends on the direction in the "
                "complex plane, so there is no complex Jacobian (a conjugate, abs, real or imag does this)",
                f"g = lambda x: torch.view_as_real({call.name}(torch.view_as_complex(x)))\n"
                f"{call.api}(g)(torch.view_as_real(z))  # the real Jacobian, [..., 2] out and in",
            )
        )
