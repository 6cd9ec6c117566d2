"""Random programs of views, writes in place and changed shapes: values and derivatives as in a loop of plain torch."""

import os
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lanewise import functionalize, grad, hessian, jacfwd, jacrev, vmap
from tests.oracles import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")

SEEDS = range(800 if os.environ.get("LANEWISE_FULL") else 40)
CALLS = 2  # the first goes through planes, later ones may be recorded below
D = torch.float64

VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t.t() if t.dim() == 2 else t.unsqueeze(0),
    lambda t: t[0] if t.dim() and t.shape[0] > 1 else t,
    lambda t: t[1:] if t.dim() and t.shape[0] > 1 else t,
    lambda t: t.unsqueeze(0) if t.dim() < 3 else t,
    lambda t: t.squeeze(),
    lambda t: t.transpose(0, -1) if t.dim() > 1 else t,
    lambda t: t.flatten(),
    lambda t: t.diagonal() if t.dim() == 2 else t,
    lambda t: t[..., ::2] if t.dim() else t,
    lambda t: t[..., None],
    lambda t: t.narrow(-1, 0, 1) if t.dim() else t,
    lambda t: t.movedim(0, -1) if t.dim() else t,
    lambda t: t.view_as(t),
    lambda t: t.reshape(-1, 1),
    lambda t: t.unfold(0, 2, 2) if t.dim() and t.shape[0] > 1 else t,
    lambda t: t.select(-1, -1) if t.dim() else t,
    lambda t: t.mT if t.dim() > 1 else t,
    lambda t: t.detach(),
]
DETACHES = len(VIEWS) - 1


def _set_first(t: Tensor, _other: Tensor, x: Tensor) -> None:
    if t.dim():
        t[0] = x[0]


def _set_positive(t: Tensor, _other: Tensor, _x: Tensor) -> None:
    if t.dim():
        t[t > 0] = 0.5
    else:
        t.mul_(2)


def _scale_where_positive(t: Tensor, other: Tensor, x: Tensor) -> None:
    if x[0] > 0:
        t.mul_(2)


def _shift_or_scale(t: Tensor, other: Tensor, x: Tensor) -> None:
    if t.sum() > 0:
        t.add_(x[1])
    else:
        other.mul_(0.5)


WRITES: list[Callable[[Tensor, Tensor, Tensor], object]] = [
    lambda t, _, x: t.mul_(x.sum() * 0.3 + 0.5),
    lambda t, other, _: t.add_(other.sum() * 0.1),
    lambda t, *_: t.sin_(),
    lambda t, other, _: t.__setitem__(..., other.mean() * 0.2),
    lambda t, other, x: t.copy_(other.reshape(-1)[0] * 0.5 + x[1]),
    _set_first,
    _set_positive,
    _scale_where_positive,
    _shift_or_scale,
]
RESHAPES: list[Callable[[Tensor], object]] = [
    lambda t: t.unsqueeze_(0),
    lambda t: t.squeeze_(),
    lambda t: t.t_() if t.dim() == 2 else None,
    lambda t: t.transpose_(0, -1) if t.dim() > 1 else None,
    lambda t: t.swapaxes_(0, 1) if t.dim() == 2 else None,
]
MADE: list[Callable[[], Tensor]] = [
    lambda: torch.zeros(2, 3, dtype=D),
    lambda: torch.ones(4, dtype=D),
    lambda: torch.full((2, 2), 0.5, dtype=D),
    lambda: torch.eye(3, dtype=D),
]


class Program:
    """A few steps, each on tensors that it or earlier ones have made; the result has a part of all of them."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        kinds = ["view", "view", "write", "write", "write", "write", "reshape", "compute", "make"]
        steps = [
            (rng.choice(kinds), rng.random(), rng.random(), rng.randrange(1000)) for _ in range(rng.randint(3, 13))
        ]
        self.steps = steps
        self.detaches = any(kind == "view" and which % len(VIEWS) == DETACHES for kind, _, _, which in steps)

    def __call__(self, x: Tensor) -> Tensor:
        tensors = [x * 2]
        for kind, a, b, which in self.steps:
            t, other = tensors[int(a * len(tensors))], tensors[int(b * len(tensors))]
            if kind == "view":
                tensors.append(VIEWS[which % len(VIEWS)](t))
            elif kind == "write":
                WRITES[which % len(WRITES)](t, other, x)
            elif kind == "reshape":
                RESHAPES[which % len(RESHAPES)](t)
            elif kind == "compute":
                tensors.append(t * 1.5 + x.mean())
            else:
                tensors.append(MADE[which % len(MADE)]())
        out = x.sum()
        for place, t in enumerate(tensors):
            weights = torch.arange(1.0, t.numel() + 1, dtype=D).reshape(t.shape)
            out = out + (t * weights).sum() * (place + 1) * 0.1 + (t**2).sum() * 0.05
        return out


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_of_views_and_writes(seed: int) -> None:
    f = Program(seed)
    for call in range(CALLS):
        xs = torch.randn((3, 1, 2, 5)[seed % 4], 4, dtype=D, generator=torch.Generator().manual_seed(seed + call))
        values = torch.stack([f(x) for x in xs])
        try:
            gradients = torch.stack([torch.autograd.functional.jacobian(f, x) for x in xs])
        except RuntimeError as error:
            assert "a leaf Variable" in str(error)
            pytest.skip("plain torch: it takes a view of what was written since for a leaf")
        assert_same(vmap(f)(xs), values)
        assert_same(vmap(f, 1)(xs.t().contiguous()), values)
        assert_same(vmap(grad(f))(xs), gradients)
        assert_same(vmap(vmap(grad(f)))(xs[None])[0], gradients)
        assert_same(vmap(jacrev(f))(xs), gradients)
        assert_same(grad(lambda xs: vmap(f)(xs).sum())(xs), gradients)
        assert_same(vmap(jacfwd(f))(xs), gradients)
        assert_same(vmap(hessian(f))(xs), torch.stack([torch.autograd.functional.hessian(f, x) for x in xs]))
        if not f.detaches:  # `functionalize` knows no cut of memory that both share
            assert_same(vmap(grad(functionalize(f)))(xs), gradients)
