"""Tensors given another shape in place, before and after writes; views by strides of tensors that begin further on."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lanewise import functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vmap
from tests.oracles import assert_same, loop_vmap

CALLS = 3  # the first goes through planes, later ones may be recorded below
D = torch.float64
W = torch.arange(1.0, 5.0, dtype=D)
PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {}


def program(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    PROGRAMS[f.__name__] = f
    return f


@program
def write_to_a_transposed_view(x):
    y = x * 2
    view = y.view(2, 2)
    view.t_()
    view[0] *= 3
    return (y**2 * W).sum()


@program
def write_to_an_element_of_a_swapped_view(x):
    y = x * 2
    view = y.view(2, 2)
    view.swapdims_(0, 1)
    view[0, 1] = x[0]
    return (y**2 * W).sum()


@program
def copy_into_a_part_of_a_transposed_view(x):
    y = x * 2
    view = y.view(2, 2)
    view.t_()
    view.select(0, 0).copy_(x[2:] * 5)
    return (y**2 * W).sum()


@program
def write_to_a_squeezed_view(x):
    y = x * 2
    view = y.view(1, 2, 2)
    view.squeeze_()
    view[0] *= 3
    return (y**2 * W).sum()


@program
def write_to_a_longer_view(x):
    y = x * 2
    view = y[1:]
    view.unsqueeze_(0)
    view[0] *= 3
    return (y**2 * W).sum()


@program
def write_to_a_view_by_strides(x):
    y = x * 2
    view = y.view(2, 2)
    view.as_strided_((2,), (2,))
    view *= x[0]
    return (y**2 * W).sum()


@program
def write_to_what_a_transposed_view_is_of(x):
    y = x * 2
    view = y.view(2, 2)
    view.t_()
    y.mul_(x)
    return (view[0] ** 2).sum()


@program
def write_to_a_view_of_what_is_longer_since(x):
    y = x * 2
    view = y[1:]
    y.unsqueeze_(0)
    view.mul_(3)
    return (y**2 * W).sum()


@program
def write_to_what_is_longer_since_a_view(x):
    y = x * 2
    view = y[1:]
    y.unsqueeze_(0)
    y.mul_(x)
    return (view**2).sum() + y.sum()


@program
def views_from_before_and_after(x):
    y = torch.zeros(2, 2, dtype=D)
    first = y[0]
    y.t_()
    second = y[0]
    y.unsqueeze_(0)
    third = y[0, 0]
    y[0, 0, 1] = x[0]
    y[0, 1, 0] = x[1] ** 2
    third[0] = x[2]
    return (first * W[:2]).sum() + (second * W[2:]).sum() * y[0, 1, 1] + (third**2).sum()


@program
def write_to_a_view_from_before(x):
    y = torch.zeros(2, 2, dtype=D)
    row = y[0]
    y.t_()
    row[1] = x[0]
    return (y.reshape(4) * W).sum() ** 2


@program
def parts_from_before(x):
    y = torch.eye(2, dtype=D)
    a, b = y[0], y[1]
    y.t_()
    b[0] = x[1]
    y = y * x[0]
    return (y.reshape(4) * W).sum() ** 2 + a.sum()


@program
def writes_after_it_was_squeezed(x):
    y = torch.ones(4, dtype=D)
    y.squeeze_()
    y[0] = x[0]
    y.mul_(2)
    return (y**2 * W).sum() * x[1]


@program
def writes_after_it_was_transposed(x):
    y = torch.ones(2, 3, dtype=D)
    y.t_()
    y[0] = x[0]
    y.mul_(x[1])
    return (y**2).sum() * x[1]


@program
def there_and_back(x):
    y = x.clone()
    y.unsqueeze_(0)
    y.squeeze_(0)
    y[1:].mul_(2)
    return (y**3 * W).sum()


@program
def in_some_lanes(x):
    y = x * 2
    view = y.view(2, 2)
    if x[0] > 0:
        view.t_()
        view[0] *= 3
    return (y**2 * W).sum()


@program
def in_a_loop(x):
    y = x * 2
    view = y.view(2, 2)
    while x[0] < 3:
        view.t_()
        view[0] *= x[1]
        x = x + 1
    return (y**2 * W).sum()


@program
def strides_from_where_it_begins(x):
    y = x * 2
    part = y[1:]
    return (part.as_strided((2,), (1,), part.storage_offset()) ** 2 * part.as_strided((2,), (1,))).sum()


@program
def strides_from_further_on(x):
    return ((x * 2)[1:].as_strided((2,), (1,), 2) ** 2 * W[:2]).sum()


@program
def write_by_strides_from_further_on(x):
    y = x * 2
    y[1:].as_strided((1,), (1,), 3).mul_(5)
    return (y**2 * W).sum()


def _gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    return torch.autograd.grad(f(x), x)[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_derivatives(name: str) -> None:
    f = PROGRAMS[name]
    for seed in range(CALLS):
        xs = torch.randn(3, 4, dtype=D, generator=torch.Generator().manual_seed(seed))
        x, direction = xs[0], xs[1]
        gradients = torch.stack([_gradient(f, each) for each in xs])
        second = torch.autograd.functional.hessian(f, x)
        assert_same(vmap(f)(xs), loop_vmap(f)(xs))
        assert_same(vmap(f, 1)(xs.t().contiguous()), loop_vmap(f)(xs))
        for transform in (grad, jacrev, jacfwd, lambda f: grad(functionalize(f))):
            assert_same(vmap(transform(f))(xs), gradients)
            assert_same(vmap(vmap(transform(f)))(xs[None])[0], gradients)
        assert_same(grad(lambda xs: vmap(f)(xs).sum())(xs), gradients)
        assert_same(vmap(hessian(f))(xs)[0], second)
        assert_same(jvp(grad(f), (x,), (direction,))[1], second @ direction)
        assert_same(grad(lambda x, d=direction: jvp(f, (x,), (d,))[1])(x), second @ direction)
        assert_same(linearize(f, x)[1](direction), gradients[0] @ direction)


@pytest.mark.parametrize("by_method", [True, False])
def test_strides_from_before_where_it_begins_are_refused(by_method: bool) -> None:
    def f(x):
        part = (x * 2)[1:]
        return (part.as_strided((2,), (1,), 0) if by_method else torch.as_strided(part, (2,), (1,), 0)).sum()

    x = torch.randn(3, 4, dtype=D)
    for transformed in (vmap(f), vmap(grad(f))):
        with pytest.raises(RuntimeError, match=r"memory that is not its own[\s\S]*x\.as_strided\(size, stride\) "):
            transformed(x)
    with pytest.raises(RuntimeError, match=r"begins at 1 has no derivative[\s\S]*x\.as_strided\(size, stride\) "):
        jvp(grad(f), (x[0],), (x[1],))


def test_a_view_whose_gradient_is_retained() -> None:
    def f(x, whole):
        y = x * 2
        part = y if whole else y.view(2, 2)
        part.retain_grad()
        part.unsqueeze_(0)
        return (part**2).sum()

    x = torch.randn(2, 4, dtype=D)
    assert_same(vmap(grad(f), (0, None))(x, True), 8 * x)
    with pytest.raises(RuntimeError, match=r"unsqueeze_ of a view[\s\S]*x = x\.unsqueeze\(\.\.\.\)"):
        vmap(grad(f), (0, None))(x, False)
