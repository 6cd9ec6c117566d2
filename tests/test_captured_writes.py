"""Writes in place into tensors from outside: reverse mode does what plain autograd does, the others refuse."""

import numpy as np
import pytest
import torch

from lanewise import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, value_and_grad, vjp, vmap
from lanewise.errors import CapturedWriteError
from tests.oracles import assert_same

X = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


def added(kept, x):
    kept.add_(x)
    return (kept * x).sum()


def added_and_left(kept, x):
    kept.add_(x * x)
    return (x**3).sum()


def through_a_view(kept, x):
    kept[:2].mul_(x[1:])
    return (kept * x * x).sum()


def copied(kept, x):
    kept.copy_(x.sin())
    return (kept * x).sum()


def an_entry(kept, x):
    kept[1] = x[0] * x[2]
    return (kept * x).sum()


def between_reads(kept, x):
    before = kept.sum() * x.sum()
    kept.add_(x.exp())
    return before + (kept * x).sum()


def scattered(kept, x):
    kept.index_add_(0, torch.tensor([0, 2]), x[:2] ** 2)
    return (kept * x).sum()


WRITES = [added, added_and_left, through_a_view, copied, an_entry, between_reads, scattered]
ONE = torch.tensor(1.0, dtype=torch.float64)
FIRST = {
    "grad": grad,
    "grad_and_value": lambda f: lambda x: grad_and_value(f)(x)[0],
    "value_and_grad": lambda f: lambda x: value_and_grad(f)(x)[1],
    "vjp": lambda f: lambda x: vjp(f, x)[1](ONE)[0],
    "jacrev": jacrev,
}
SECOND = {
    "hessian": hessian,
    "jacrev of grad": lambda f: jacrev(grad(f)),
}
REFUSED = {
    "jvp": lambda f: jvp(f, (X,), (X,)),
    "linearize": lambda f: linearize(f, X),
    "jacfwd": lambda f: jacfwd(f)(X),
    "jvp of grad": lambda f: jvp(grad(f), (X,), (X,)),
    "grad of jvp": lambda f: grad(lambda x: jvp(f, (x,), (x,))[1])(X),
    "vmap": lambda f: vmap(f)(X[None]),
    "vmap of grad": lambda f: vmap(grad(f))(X[None]),
    "grad of vmap": lambda f: grad(lambda xs: vmap(f)(xs).sum())(X[None]),
    "vmap of hessian": lambda f: vmap(hessian(f))(X[None]),
}


def both(f, transform, plain):
    """What a transform and plain autograd give, and leave in a tensor from outside."""
    first, second = torch.linspace(1, 2, 3, dtype=torch.float64), torch.linspace(1, 2, 3, dtype=torch.float64)
    found = transform(lambda x: f(first, x))(X), plain(lambda x: f(second, x), X)
    return [(y.detach(), kept.detach(), kept.requires_grad) for y, kept in zip(found, (first, second), strict=True)]


def plain_grad(f, x, create_graph=False):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x), x, create_graph=create_graph)[0]


def plain_hessian(f, x):
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    return torch.stack([torch.autograd.grad(entry, x, retain_graph=True)[0] for entry in g])


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", FIRST)
def test_first_derivatives(name, write):
    got, want = both(write, FIRST[name], plain_grad)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives(name, write):
    got, want = both(write, SECOND[name], plain_hessian)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, write):
    kept = torch.linspace(1, 2, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="captured Tensor|inplace arithmetic"):
        REFUSED[name](lambda x: write(kept, x))
    assert torch.equal(kept, torch.linspace(1, 2, 3, dtype=torch.float64)) and not kept.requires_grad


def test_what_was_written_goes_on_outside():
    kept = torch.zeros(3, dtype=torch.float64)
    x = X.clone().requires_grad_()
    grad(lambda x: added(kept, x))(x)
    (kept * kept).sum().backward()
    torch.testing.assert_close(x.grad, 2 * X)


def test_again():
    """Each call adds to what the calls before have written."""
    kept = torch.zeros(3, dtype=torch.float64)
    for i in (1, 2, 3):
        torch.testing.assert_close(grad(lambda x: added(kept, x))(X).detach(), (i + 1) * X)


def test_a_leaf_is_refused_as_outside():
    leaf = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    for run in (grad, jacrev, hessian):
        with pytest.raises(
            RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"
        ):
            run(lambda x: added(leaf, x))(X)


OPTIMIZERS = {
    "SGD": lambda w: torch.optim.SGD([w], lr=0.1),
    "SGD, momentum": lambda w: torch.optim.SGD([w], lr=0.1, momentum=0.9),
    "SGD, foreach": lambda w: torch.optim.SGD([w], lr=0.1, foreach=True),
    "Adam": lambda w: torch.optim.Adam([w], lr=0.1),
    "RMSprop": lambda w: torch.optim.RMSprop([w], lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_of_an_optimizer(name):
    """On weights from outside it raises, and both things that the message says to write work."""
    xs = torch.tensor([1.0, 2.0, 3.0])
    loss = lambda w, x: (w * x - 1).square().sum()
    w = torch.ones(2, requires_grad=True)
    optimizer = OPTIMIZERS[name](w)

    def backward(x):
        loss(w, x).backward()
        return x

    def steps(x):
        backward(x)
        optimizer.step()
        return x

    with pytest.raises(RuntimeError) as caught:
        vmap(steps)(xs)
    said = str(caught.value).splitlines()
    assert said[0].endswith(
        "would be written into argument `self` [2], which was made outside the mapped function and has no lanes. An "
        "optimizer keeps it: in a loop, each example goes on from what the step of the one before has left"
    )
    assert said[1].endswith("optimizer.step()")
    assert said[2:] == [
        "Write instead:",
        "  optimizer.step()  # after the vmap: one step, by the gradients of all lanes, which backward() adds up",
        "  w = w.detach().clone().requires_grad_()  # inside, and an optimizer of it: weights of each lane",
    ]

    def stepped(map_over):
        nonlocal w
        w = torch.ones(2, requires_grad=True)
        optimizer = OPTIMIZERS[name](w)
        map_over(backward)
        optimizer.step()
        return w.detach()

    torch.testing.assert_close(stepped(lambda f: vmap(f)(xs)), stepped(lambda f: [f(x) for x in xs]))

    def of_its_own(x):
        own = w.detach().clone().requires_grad_()
        optimizer = OPTIMIZERS[name](own)
        for _ in range(3):
            optimizer.zero_grad()
            loss(own, x).backward()
            optimizer.step()
        return own.detach()

    torch.testing.assert_close(vmap(of_its_own)(xs), torch.stack([of_its_own(x) for x in xs]))


# --- where the user's code does not record ---------------------------------------------------------------------------

WEIGHT = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
ROWS = torch.tensor([[1.0, -2.0, 3.0], [-0.5, 0.25, 4.0]], dtype=torch.float64)


def unrecorded_add(x):
    own = WEIGHT.sin()
    with torch.no_grad():
        own.add_(x)
    return (own * own).sum()


def unrecorded_with_a_view(x):
    own = WEIGHT * 2
    view = own[:2]
    with torch.no_grad():
        own.add_(x)
    return (own * own).sum() + (view**3).sum()


def unrecorded_view(x):
    own = WEIGHT * 2
    view = own[0]
    with torch.no_grad():
        view.add_(x[0])
    view.mul_(2)
    return (own * own).sum() + view**3


def unrecorded_mask(x):
    own = WEIGHT * 1
    with torch.no_grad():
        own[x > 0] = 0.0
    return (own * x).sum()


def unrecorded_list(x):
    own = WEIGHT * 1
    with torch.no_grad():
        torch._foreach_mul_([own], [x])
    return (own * own).sum()


def unrecorded_branch(x):
    own = WEIGHT * 1
    with torch.no_grad():
        if x.sum() > 3:
            own.add_(x)
        else:
            own.mul_(x)
    return (own * own).sum()


@pytest.mark.parametrize(
    "f",
    [
        unrecorded_add,
        unrecorded_with_a_view,
        unrecorded_view,
        unrecorded_mask,
        unrecorded_list,
        unrecorded_branch,
        grad(unrecorded_mask),
        lambda x: vmap(unrecorded_add)(torch.stack([x, 2 * x])),
    ],
)
def test_lanes_written_without_recording_leave_the_history(f):
    out, expected = vmap(f)(ROWS), torch.stack([f(row) for row in ROWS])
    torch.testing.assert_close(out, expected)
    assert out.requires_grad and expected.requires_grad
    ours, theirs = (torch.autograd.grad(each.sin().sum(), WEIGHT)[0] for each in (out, expected))
    torch.testing.assert_close(ours, theirs)


TRANSFORMS = {**FIRST, "jacrev of a sum": lambda f: lambda x: jacrev(lambda x: f(x)[None])(x)[0]}


def by_detach(w, x):
    return (w.detach().mul_(x) * w).sum()


def by_data(w, x):
    return (w.data.add_(x) * w).sum()


def by_a_view(w, x):
    return (w[:2].detach().copy_(x[:2]) * w[:2]).sum()


def without_recording(w, x):
    with torch.no_grad():
        w.mul_(x)
    return (w * w).sum()


@pytest.mark.parametrize("f", [by_detach, by_data, by_a_view, without_recording])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_lanes_are_not_written_into_what_is_differentiated(name, f):
    """In a loop, the second example finds what the first has written: the argument is an alias of what was passed."""
    kept = X.clone()
    slope = vmap(lambda x: TRANSFORMS[name](lambda w: f(w, x))(kept))
    within = vmap(lambda w: vmap(lambda x: TRANSFORMS[name](lambda w: f(w, x))(w))(ROWS))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="through the argument of a gradient"):
            slope(ROWS)
        with pytest.raises(RuntimeError, match="through the argument of a gradient"):
            within(ROWS)
        assert torch.equal(kept, X)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_hooks_and_writes_to_copies_of_what_is_differentiated(name):
    def f(w, x):
        w.register_hook(lambda g: g * x)
        own = w.detach().clone().mul_(x)
        return (own * w).sum()

    want = torch.stack([X * row * row for row in ROWS])
    for _ in range(3):
        torch.testing.assert_close(vmap(lambda x: TRANSFORMS[name](lambda w: f(w, x))(X))(ROWS), want)


MAKERS = {
    "from_numpy": lambda array: torch.from_numpy(array),
    "as_tensor": lambda array: torch.as_tensor(array),
    "asarray": lambda array: torch.asarray(array),
}


@pytest.mark.parametrize("name", MAKERS)
def test_lanes_are_not_written_into_the_memory_of_an_array(name):
    array, make = np.ones(2), MAKERS[name]
    xs = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64)
    writes = {
        "all": lambda x: make(array).add_(x),
        "a view": lambda x: make(array)[1:].copy_(x[:1]),
        "an item": lambda x: make(array).__setitem__(0, x[1]) or x,
    }
    for write in writes.values():
        for transformed in (vmap(write), vmap(grad(lambda x, write=write: write(x).sum()))):
            with pytest.raises(CapturedWriteError, match=r"NumPy array[\s\S]*torch\.tensor\(array\)"):
                transformed(xs)
    assert (array == 1).all()
    assert_same(vmap(lambda x: make(array) * x)(xs), xs)
    assert_same(vmap(lambda x: make(np.ones(2)).mul_(x))(xs), xs)  # nobody else knows of it
    assert_same(vmap(lambda x: torch.tensor(array).mul_(x))(xs), xs)
    vmap(lambda x: make(array).add_(1) * x)(xs)
    assert (array == 2).all()
