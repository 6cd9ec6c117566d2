"""Packed sequences through recurrent layers, under every nesting, against the loop and differences."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import (
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    unpack_sequence,
    unpad_sequence,
)

from lanewise import functional_call, grad, jvp, stack_module_state, vmap
from tests.oracles import assert_same, loop_vmap
from tests.rules.test_rnn import flat

D = torch.float64
LAYERS = {
    "lstm": lambda: nn.LSTM(3, 4),
    "lstm deep": lambda: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2),
    "gru batch first": lambda: nn.GRU(3, 4, batch_first=True),
    "rnn": lambda: nn.RNN(3, 4, 2, bidirectional=True),
}
SORTED, UNSORTED = torch.tensor([5, 2]), torch.tensor([2, 5])
X, T = (torch.randn(4, 5, 2, 3, dtype=D, generator=torch.Generator().manual_seed(k)) for k in (0, 1))


def through(module, lengths):
    """x [5, 2, 3] -> all that comes out, padded"""
    first = module.batch_first

    def f(x):
        packed = pack_padded_sequence(x.transpose(0, 1) if first else x, lengths, first, enforce_sorted=False)
        out, state = module(packed)
        return flat((*pad_packed_sequence(out, first, padding_value=-1.0, total_length=6), state))

    return f


def squares(f):
    return lambda x: sum(t.square().sum() for t in f(x) if t.is_floating_point())


def plain_grad(f):
    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x), x)[0]

    return gradient


def slope(f, x, t, step=1e-6):
    return tuple((a - b) / (2 * step) for a, b in zip(f(x + step * t), f(x - step * t), strict=True))


@pytest.mark.parametrize("lengths", [SORTED, UNSORTED], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_nesting(name, lengths):
    module = LAYERS[name]().to(D).requires_grad_(False)
    f = through(module, lengths)
    loss = squares(f)
    assert_same(vmap(f)(X), loop_vmap(f)(X))
    assert_same(vmap(vmap(f))(torch.stack([X, T])), loop_vmap(loop_vmap(f))(torch.stack([X, T])))
    assert_same(vmap(grad(loss))(X), loop_vmap(plain_grad(loss))(X))
    assert_same(grad(lambda x: squares(vmap(f))(x))(X), loop_vmap(plain_grad(loss))(X))
    real = lambda x: tuple(t for t in f(x) if t.is_floating_point())
    want = loop_vmap(lambda x, t: slope(real, x, t))(X, T)
    assert_same(vmap(lambda x, t: jvp(real, (x,), (t,))[1])(X, T), want, (1e-6, 1e-7))
    assert_same(jvp(vmap(real), (X,), (T,))[1], want, (1e-6, 1e-7))
    second = loop_vmap(lambda x, t: slope(lambda x: (plain_grad(loss)(x),), x, t, 1e-5)[0])(X, T)
    assert_same(vmap(lambda x, t: jvp(grad(loss), (x,), (t,))[1])(X, T), second, (1e-5, 1e-6))
    with torch.inference_mode():
        assert_same(vmap(f)(X), loop_vmap(f)(X))
        assert_same(vmap(grad(loss))(X), loop_vmap(grad(loss))(X))


def test_lengths_that_lanes_share():
    """Made inside, a list, or a mapped tensor with the same numbers in each lane."""
    module = nn.GRU(3, 4).to(D).requires_grad_(False)
    run = lambda x, lengths: module(pack_padded_sequence(x, lengths))[1]
    want = loop_vmap(lambda x: run(x, SORTED))(X)
    assert_same(vmap(lambda x: run(x, torch.tensor([5, 2])))(X), want)
    assert_same(vmap(lambda x: run(x, [5, 2]))(X), want)
    assert_same(vmap(run)(X, SORTED.expand(4, 2)), want)
    assert_same(vmap(vmap(run))(X[None], SORTED.expand(1, 4, 2)), want[None])
    assert_same(vmap(lambda l: run(X[0], l))(SORTED.expand(4, 2)), want[:1].expand(4, 1, 2, 4))


WAYS = {
    "data": lambda x: pack_padded_sequence(x, SORTED).data,
    "unpack": lambda x: tuple(unpack_sequence(pack_padded_sequence(x, SORTED))),
    "unpad": lambda x: tuple(unpad_sequence(x * 1, SORTED)),
    "sequences": lambda x: pad_packed_sequence(pack_sequence([x[:2, 1], x[:, 0]], enforce_sorted=False)),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_in_and_out(way):
    f = WAYS[way]
    loss = squares(lambda x: flat(f(x)))
    assert_same(vmap(f)(X), loop_vmap(f)(X))
    assert_same(grad(squares(lambda x: flat(vmap(f)(x))))(X), loop_vmap(plain_grad(loss))(X))
    assert_same(vmap(grad(loss))(X), loop_vmap(plain_grad(loss))(X))


def test_states_and_weights_with_lanes():
    models = [nn.LSTM(3, 4).to(D) for _ in range(4)]
    params, _ = stack_module_state(models)
    state = torch.randn(4, 1, 2, 4, dtype=D)
    run = lambda module, x, s: flat(module(pack_padded_sequence(x, SORTED), (s, s))[1])
    lanes = lambda p, x, s: flat(functional_call(models[0], p, (pack_padded_sequence(x, SORTED), (s, s)))[1])
    got = vmap(lanes)(params, X, state)
    want = tuple(torch.stack(part) for part in zip(*[run(*lane) for lane in zip(models, X, state)], strict=True))
    assert_same(tuple(t.detach() for t in got), tuple(t.detach() for t in want))
    sum(t.square().sum() for t in got).backward()
    sum(t.square().sum() for t in want).backward()
    for name, given in params.items():
        assert_same(given.grad, torch.stack([dict(model.named_parameters())[name].grad for model in models]))
    assert [t.shape for t in vmap(lanes)(*[{k: v[:0] for k, v in params.items()}, X[:0], state[:0]])] == [
        (0, 1, 2, 4)
    ] * 2


@pytest.mark.parametrize("lengths", [[[5, 2], [4, 4], [5, 2], [3, 1]], [[2, 5], [4, 4], [5, 2], [1, 3]]], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_lengths_of_each_lane(name, lengths):
    module, lengths = LAYERS[name]().to(D).requires_grad_(False), torch.tensor(lengths)
    f = lambda x, l: through(module, l)(x)
    loss = lambda x, l: squares(through(module, l))(x)
    assert_same(vmap(f)(X, lengths), loop_vmap(f)(X, lengths))
    want = loop_vmap(lambda x, l: plain_grad(lambda x: loss(x, l))(x))(X, lengths)
    assert_same(vmap(grad(loss))(X, lengths), want)
