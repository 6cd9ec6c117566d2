"""`.grad` of a leaf that only some lanes have given a gradient: None in the others."""

import copy

import pytest
import torch

from lanewise import grad, vmap

pytestmark = pytest.mark.usefixtures("parting")

XS = torch.randn(9, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
KS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0])


def one_side(x, k):
    z = x.detach().clone().requires_grad_()
    if x[0] > 0:
        (z**3).sum().backward()
    return z.grad * x if z.grad is not None else x


def both_and_neither(x, k):
    z = x.detach().clone().requires_grad_()
    if x[0] > 0:
        (z**3).sum().backward()
    for i in range(int(k) // 2):
        (z * z[i % 2]).sum().backward()
    return z.grad * x if z.grad is not None else x


def set_in_a_branch(x, k):
    z = x.detach().clone().requires_grad_()
    for i in range(3):
        if x[0] > 0 or k > i:
            (z**3 * i).sum().backward()
        if z.grad is None:
            z = (z.detach() * 2).requires_grad_()
        elif k > 1:
            z.grad = None
        elif k == 0:
            z.grad.zero_()
        else:
            z.grad.add_(1)
    return z.detach() + (5 if z.grad is None else z.grad) * x


def optimizer(x, k):
    z = x.detach().clone().requires_grad_()
    adam = torch.optim.Adam([z], lr=0.1)
    for i in range(3):
        adam.zero_grad()
        if x[0] > 0 or k > i:
            (z**3).sum().backward()
        adam.step()
    return z.detach() * x


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("program", [one_side, both_and_neither, set_in_a_branch, optimizer], ids=lambda p: p.__name__)
def test_as_the_loop(program):
    want = torch.stack([program(x, k) for x, k in zip(XS, KS)])
    for _ in range(2):
        torch.testing.assert_close(vmap(program)(XS, KS), want)
    slopes = torch.stack([grad(lambda x, k: program(x, k).sum())(x, k) for x, k in zip(XS, KS)])
    torch.testing.assert_close(vmap(grad(lambda x, k: program(x, k).sum()))(XS, KS), slopes)


# --- a leaf from outside ---------------------------------------------------------------------------------------------


def some(w, x, k):
    if x.sum() > 0:
        (w * x).sum().backward()
    return x * 0 + 7 if w.grad is None else w.grad * 1


def and_others_later(w, x, k):
    if x.sum() > 0:
        (w * x).sum().backward()
    had = w.grad is not None
    (w * w * x).sum().backward()
    return w.grad * (2.0 if had else 1.0)


def as_often_as_it_says(w, x, k):
    for i in range(int(k)):
        (w * x * (i + 1)).sum().backward()
    return x * 0 + 7 if w.grad is None else w.grad * 1


def by_other_functions(w, x, k):
    def pull():
        if x.sum() > 0:
            (w * x).sum().backward()

    def pulled():
        return w.grad

    pull()
    found = pulled()
    return x * 0 + 7 if found is None else found * 1


def in_a_list(w, x, k):
    if x.sum() > 0:
        (w * x).sum().backward()
    return sum([p.grad for p in [w] if p.grad is not None], x * 0)


OUTSIDE = [some, and_others_later, as_often_as_it_says, by_other_functions, in_a_list]


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("way", ["converted", "as written"])
@pytest.mark.parametrize("before", [None, torch.tensor([10.0, 20.0], dtype=torch.float64)], ids=["none", "set"])
@pytest.mark.parametrize("program", OUTSIDE, ids=lambda p: p.__name__)
def test_from_outside(program, before, way, monkeypatch):
    """What it was before, in lanes that have called no backward pass."""
    if way == "as written":
        monkeypatch.setattr("lanewise._control.runs.split.converted", lambda func: None)
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def f(x, k):
        w.grad = None if before is None else before.clone()
        return program(w, x, k)

    want = torch.stack([f(x, k) for x, k in zip(XS, KS)])
    torch.testing.assert_close(vmap(f)(XS, KS), want)
    torch.testing.assert_close(vmap(vmap(f))(XS[:8].view(2, 4, 2), KS[:8].view(2, 4)).flatten(0, 1), want[:8])


# --- where each lane takes its way through code that is run again, or a library reads it ------------------------------


def without_source(f):
    """The function, of code that cannot be converted."""
    code = f.__code__.replace(co_filename="<nowhere>", co_firstlineno=f.__code__.co_firstlineno + 10_000)
    return type(f)(code, f.__globals__, f.__name__)


@without_source
def pull(w, x):
    if x > 0:
        (w * x).sum().backward()


@without_source
def pull_twice(w, x):
    if x > 1:
        (w * x).sum().backward()
    if x > 0:
        (w * x * 3).sum().backward()


def by_others(w, v, x):
    pull(w, x)
    return x if w.grad is None else w.grad.sum()


def by_others_and_itself(w, v, x):
    pull_twice(w, x)
    (w * x).sum().backward()
    return w.grad.sum()


def clipped_in_a_branch(w, v, x):
    pull(w, x)
    if x > 1:
        torch.nn.utils.clip_grad_norm_([w], 1.0)
    return x if w.grad is None else w.grad.sum()


def clipped(w, v, x):
    if x > 0:
        (w * x).sum().backward()
    if x < 1.5:
        torch.nn.utils.clip_grad_norm_([w], 1.0)
    return x if w.grad is None else w.grad.sum()


def clipped_together(w, v, x):
    pull(w, x)
    (v * x).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_([w, v], 1.0)
    return norm + sum([p.grad.sum() for p in (w, v) if p.grad is not None])


def zeroed_by_an_optimizer(w, v, x):
    optimizer = torch.optim.SGD([w], lr=0.1)
    if x > 0:
        pull(w, x)
    if x < 1:
        optimizer.zero_grad()
    return x if w.grad is None else w.grad.sum()


def returned_early(w, v, x):
    if x > 0:
        (w * x).sum().backward()
    else:
        return x * 5 + (0 if w.grad is None else w.grad.sum())
    return torch.nn.utils.clip_grad_norm_([w], 1.0) + w.grad.sum()


def set_to_none_by_its_value(w, v, x):
    if x > 0:
        (w * x).sum().backward()
    if w.grad is not None and w.grad.sum() > 3:
        w.grad = None
    (w * x).sum().backward()
    return w.grad.sum()


def in_a_branch_and_in_all(w, v, x):
    if x > 0:
        (w * x * 3).sum().backward()
    (w * x).sum().backward()
    return w.grad.sum()


def zeroed_in_some(w, v, x):
    if x > 0:
        torch.optim.SGD([w, v], lr=0.1).zero_grad()
    return x * 2 if w.grad is None else w.grad.sum() + x


@without_source
def zero_large(w, x):
    if x > 1:
        w.grad = None


def zeroed_by_others(w, v, x):
    zero_large(w, x)
    return x * 2 if w.grad is None else w.grad.sum() + x


def zeroed_by_others_later(w, v, x):
    pull(w, x)
    zero_large(w, x)
    pull(v, x)
    return sum([p.grad.sum() for p in (w, v) if p.grad is not None], x)


READING = [
    in_a_branch_and_in_all,
    zeroed_in_some,
    zeroed_by_others,
    zeroed_by_others_later,
    by_others,
    by_others_and_itself,
    clipped_in_a_branch,
    clipped,
    clipped_together,
    zeroed_by_an_optimizer,
    returned_early,
    set_to_none_by_its_value,
]
LANES = [[1.0, -1.0], [1.0, 2.0, -1.0], [-1.0, 1.0, 2.0], [-1.0, -2.0, 1.0], [-1.0, -2.0], [2.0, -1.0, 0.5, -2.0, 3.0]]
WAYS = {
    "vmap": lambda f, xs: vmap(f)(xs),
    "chunks": lambda f, xs: vmap(f, chunk_size=2)(xs),
    "inside": lambda f, xs: vmap(vmap(f))(xs[None])[0],
    "pairs": lambda f, xs: vmap(vmap(f))(xs[:, None])[:, 0],
}


def leaves(before):
    """Two leaves, and a function that gives them the gradients they had before."""
    both = [torch.full((2,), value, dtype=torch.float64, requires_grad=True) for value in (1.0, 2.0)]

    def reset():
        for leaf in both:
            leaf.grad = None if before is None else torch.full((2,), before, dtype=torch.float64)

    return both, reset


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lanes", LANES, ids=str)
@pytest.mark.parametrize("before", [None, 10.0])
@pytest.mark.parametrize("program", READING, ids=lambda p: p.__name__)
def test_whichever_lanes_go_first(program, before, lanes, way):
    both, reset = leaves(before)

    def f(x):
        reset()
        return program(*both, x)

    xs = torch.tensor(lanes, dtype=torch.float64)
    want = torch.stack([f(x) for x in xs])
    torch.testing.assert_close(WAYS[way](f, xs), want)


def pulled(w, v, x):
    pull(w, x)
    return x


def pulled_several_times(w, v, x):
    pull_twice(w, x)
    return x * (2 if x > 1 else 3)


def either(w, v, x):
    if x > 0:
        pull(w, x)
    else:
        (w * v * x).sum().backward()
    return x


def as_often(w, v, x):
    for _ in range(int(x.abs())):
        (w * x).sum().backward()
        if x > 1.5:
            pull(v, x)
    return x


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lanes", LANES, ids=str)
@pytest.mark.parametrize("before", [None, 10.0])
@pytest.mark.parametrize("program", [pulled, pulled_several_times, either, as_often], ids=lambda p: p.__name__)
def test_what_is_left_after_the_call(program, before, lanes, way):
    both, reset = leaves(before)
    xs = torch.tensor(lanes, dtype=torch.float64)
    reset()
    for x in xs:
        program(*both, x)
    want = [None if leaf.grad is None else leaf.grad.clone() for leaf in both]
    reset()
    WAYS[way](lambda x: program(*both, x), xs)
    for leaf, wanted in zip(both, want):
        assert (leaf.grad is None) == (wanted is None)
        torch.testing.assert_close(leaf.grad, wanted)


# --- training inside -------------------------------------------------------------------------------------------------

INPUTS = torch.tensor([[1.0, 2.0], [0.5, -1.0], [0.1, 0.2], [3.0, 1.0]], dtype=torch.float64)


def trained(net, x, make, tol):
    optimizer = make(net.parameters())
    loss = torch.zeros(())
    for _ in range(8):
        optimizer.zero_grad()
        loss = (net(x) - 1).square().mean()
        if loss < tol:
            break
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return net(x)[0].detach() + loss.detach()


def made_inside(x, make):
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.3)
    return trained(net, x, make, 0.2)


BASE = torch.nn.Linear(2, 1).double()
torch.nn.init.constant_(BASE.weight, 0.5)


def fine_tuned(x, make):
    return trained(copy.deepcopy(BASE), x, make, 0.1)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("make", ["SGD", "Adam", "RMSprop"])
@pytest.mark.parametrize("program", [made_inside, fine_tuned], ids=lambda p: p.__name__)
def test_training_of_each_lane(program, make):
    def f(x):
        return program(x, lambda parameters: getattr(torch.optim, make)(parameters, lr=0.1))

    want = torch.stack([f(x) for x in INPUTS])
    for _ in range(2):
        torch.testing.assert_close(vmap(f, randomness="different")(INPUTS), want)
    torch.testing.assert_close(vmap(f, randomness="same", chunk_size=3)(INPUTS), want)
    pairs = vmap(vmap(f, randomness="same"), randomness="same")(INPUTS[None])
    torch.testing.assert_close(pairs[0], want)
