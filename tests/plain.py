"""Transforms by loops and plain torch.autograd, and nestings of transforms that are run with these and with Lanewise's.

A function under test takes one tensor and gives one. Where detached values are meant to count as constants, central
differences are no oracle, and this is.
"""

from collections.abc import Callable

import torch

import lanewise
from tests.oracles import assert_same


def plain_vmap(f: Callable, in_dims: int = 0) -> Callable:
    return lambda xs: torch.stack([f(x) for x in xs.unbind(in_dims)])


def value_and_rows(f: Callable, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The value and the Jacobian, one backward pass for each of its rows."""
    with torch.enable_grad():
        x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
        y = f(x)
        rows = [torch.zeros_like(x) for _ in range(y.numel())]
        for i, entry in enumerate(y.flatten()):
            if entry.requires_grad:
                found = torch.autograd.grad(entry, x, create_graph=True, allow_unused=True, materialize_grads=True)
                rows[i] = found[0]
    return y, torch.stack(rows).reshape(*y.shape, *x.shape)


def plain_jacobian(f: Callable) -> Callable:
    return lambda x: value_and_rows(f, x)[1]


def plain_jvp(f: Callable, primals: tuple, tangents: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    y, rows = value_and_rows(f, primals[0])
    return y, torch.tensordot(rows, tangents[0], tangents[0].dim())


def plain_linearize(f: Callable, x: torch.Tensor) -> tuple[torch.Tensor, Callable]:
    y, rows = value_and_rows(f, x)
    return y, lambda tangent: torch.tensordot(rows, tangent, tangent.dim())


class Plain:
    vmap = staticmethod(plain_vmap)
    grad = jacrev = jacfwd = staticmethod(plain_jacobian)
    jvp = staticmethod(plain_jvp)
    linearize = staticmethod(plain_linearize)


def squares(f: Callable) -> Callable:
    return lambda x: (f(x) ** 2).sum()


def along(T, f: Callable) -> Callable:
    return lambda x: T.jvp(f, (x,), (x.detach().cos() + 1,))[1]


def pushed(T, f: Callable) -> Callable:
    return lambda x: T.linearize(f, x)[1](x.detach().cos() + 1)


def pulled_outside(T, f: Callable) -> Callable:
    def gradient(xs):
        leaf = xs.detach().requires_grad_()
        return torch.autograd.grad(T.vmap(f)(leaf).sin().sum(), leaf, allow_unused=True, materialize_grads=True)[0]

    return gradient


# name -> (number of vmaps, the nesting)
NESTINGS: dict[str, tuple[int, Callable]] = {
    "vmap": (1, lambda T, f: T.vmap(f)),
    "vmap, lanes behind": (1, lambda T, f: lambda xs: T.vmap(f, in_dims=1)(xs.movedim(0, 1).contiguous())),
    "vmap vmap": (2, lambda T, f: T.vmap(T.vmap(f))),
    "vmap grad": (1, lambda T, f: T.vmap(T.grad(squares(f)))),
    "grad vmap": (1, lambda T, f: T.grad(squares(T.vmap(f)))),
    "vmap grad vmap": (2, lambda T, f: T.vmap(T.grad(squares(T.vmap(f))))),
    "grad outside": (1, pulled_outside),
    "vmap jvp": (1, lambda T, f: T.vmap(along(T, f))),
    "jvp vmap": (1, lambda T, f: along(T, T.vmap(f))),
    "jvp jvp vmap": (1, lambda T, f: along(T, along(T, T.vmap(f)))),
    "linearize": (0, pushed),
    "vmap linearize": (1, lambda T, f: T.vmap(pushed(T, f))),
    "vmap jacrev": (1, lambda T, f: T.vmap(T.jacrev(f))),
    "vmap jacfwd": (1, lambda T, f: T.vmap(T.jacfwd(f))),
    "jacfwd jacfwd": (0, lambda T, f: T.jacfwd(T.jacfwd(f))),
    "jacrev jacfwd": (0, lambda T, f: T.jacrev(T.jacfwd(f))),
    "vmap jacfwd jacrev": (1, lambda T, f: T.vmap(T.jacfwd(T.jacrev(f)))),
    "grad vmap grad": (1, lambda T, f: T.grad(squares(T.vmap(T.grad(squares(f)))))),
    "vmap grad jvp": (1, lambda T, f: T.vmap(T.grad(squares(along(T, f))))),
    "jvp jacfwd jacrev": (0, lambda T, f: along(T, T.jacfwd(T.jacrev(squares(f))))),
}
BACKWARD = [name for name in NESTINGS if not any(word in name for word in ("jvp", "jacfwd", "linearize"))]


def assert_as_plain(f: Callable, nesting: str, *shape: int, make: Callable = torch.rand) -> None:
    """One nesting gives what loops and plain torch.autograd give."""
    depth, nest = NESTINGS[nesting]
    x = make(*[3, 2][:depth], *shape, dtype=torch.float64) + 0.3
    assert_same(nest(lanewise, f)(x.clone()).detach(), nest(Plain, f)(x.clone()).detach())
