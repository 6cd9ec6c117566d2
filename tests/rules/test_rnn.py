"""Recurrent layers and cells against the loop."""

import copy

import pytest
import torch

from lanewise import functional_call, stack_module_state, vmap
from lanewise._rules.batch import rnn
from tests.oracles import assert_same

# torch says it once in a process, whichever test comes first.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

nn = torch.nn
LAYERS = {
    "lstm": lambda: nn.LSTM(3, 4),
    "lstm deep": lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True),
    "lstm no bias": lambda: nn.LSTM(3, 4, bias=False),
    "lstm proj": lambda: nn.LSTM(3, 4, proj_size=2, bidirectional=True),
    "gru": lambda: nn.GRU(3, 4, 2, batch_first=True),
    "rnn": lambda: nn.RNN(3, 4, nonlinearity="relu", bidirectional=True),
}
CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}
TOLERANCE = {torch.float32: (1e-4, 1e-5), torch.float64: (1e-9, 1e-11)}


def flat(out):
    return (out,) if isinstance(out, torch.Tensor) else tuple(t for part in out for t in flat(part))


def gradients(module, run):
    module.zero_grad()
    sum(t.square().sum() for t in flat(run())).backward()
    return tuple(p.grad.clone() for p in module.parameters())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, batched, dtype):
    module = LAYERS[name]().to(dtype)
    x = torch.randn(3, 5, 2, 3, dtype=dtype) if batched else torch.randn(3, 5, 3, dtype=dtype)
    tolerance = TOLERANCE[dtype]

    def run():
        return flat(vmap(lambda x: flat(module(x)))(x))

    def loop():
        return tuple(torch.stack(part) for part in zip(*[flat(module(lane)) for lane in x], strict=True))

    assert_same(tuple(t.detach() for t in run()), tuple(t.detach() for t in loop()), tolerance)
    assert_same(gradients(module, run), gradients(module, loop), tolerance)


def per_sample(module):
    def f(params, x):
        with torch.enable_grad():
            params = {name: p.view_as(p).requires_grad_() for name, p in params.items()}
            x = x.view_as(x).requires_grad_()
            total = sum(t.square().sum() for t in flat(functional_call(module, params, (x,))))
            return torch.autograd.grad(total, (*params.values(), x))

    return f


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", LAYERS)
def test_per_sample_gradients(name, dtype):
    module = LAYERS[name]().to(dtype)
    params = {name: p.detach() for name, p in module.named_parameters()}
    x = torch.randn(3, 5, 3, dtype=dtype)
    f = per_sample(module)
    want = tuple(torch.stack(part) for part in zip(*[f(params, lane) for lane in x], strict=True))
    assert_same(vmap(f, in_dims=(None, 0))(params, x), want, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", LAYERS)
def test_ensemble(name, dtype):
    models = [LAYERS[name]().to(dtype) for _ in range(3)]
    params, _ = stack_module_state(models)
    x = torch.randn(5, 2, 3, dtype=dtype)
    base = copy.deepcopy(models[0])
    got = vmap(lambda p, x: flat(functional_call(base, p, (x,))), in_dims=(0, None))(params, x)
    want = tuple(torch.stack(part) for part in zip(*[flat(model(x)) for model in models], strict=True))
    assert_same(tuple(t.detach() for t in got), tuple(t.detach() for t in want), TOLERANCE[dtype])
    own = {name: p.detach() for name, p in params.items()}
    lanes = [{name: p[i] for name, p in own.items()} for i in range(3)]
    f = per_sample(base)
    want = tuple(torch.stack(part) for part in zip(*[f(lane, x) for lane in lanes], strict=True))
    assert_same(vmap(f, in_dims=(0, None))(own, x), want, TOLERANCE[dtype])


@pytest.mark.parametrize("name", [name for name in LAYERS if "lstm" in name])
def test_large_layers_run_lane_by_lane(name, monkeypatch):
    monkeypatch.setattr(rnn, "LARGE", 1)
    monkeypatch.setattr(rnn, "_steps", None if "proj" not in name else rnn._steps)
    models = [LAYERS[name]() for _ in range(3)]
    params, _ = stack_module_state(models)
    x = torch.randn(5, 2, 3)
    with torch.no_grad():
        got = vmap(lambda params, x: flat(functional_call(models[0], params, (x,))), in_dims=(0, None))(params, x)
        want = tuple(torch.stack(part) for part in zip(*[flat(model(x)) for model in models], strict=True))
    assert_same(got, want, TOLERANCE[torch.float32])


@pytest.mark.parametrize("lanes", [0, 1])
def test_few_lanes(lanes):
    module = nn.LSTM(3, 4)
    out, (h, c) = vmap(module)(torch.randn(lanes, 5, 3))
    assert out.shape == (lanes, 5, 4) and h.shape == c.shape == (lanes, 1, 4)


def test_states_with_lanes():
    module = nn.LSTM(3, 4)
    x, h, c = torch.randn(5, 3), torch.randn(6, 1, 4), torch.randn(1, 4)
    got = vmap(lambda h: module(x, (h, c))[0])(h)
    assert_same(got.detach(), torch.stack([module(x, (lane, c))[0] for lane in h]).detach(), (1e-4, 1e-5))


@pytest.mark.parametrize("name", CELLS)
def test_cell(name):
    cell = CELLS[name](3, 4).double()
    x = torch.randn(5, 2, 3, dtype=torch.float64)

    def run():
        return flat(vmap(lambda x: flat(cell(x)))(x))

    def loop():
        return tuple(torch.stack(part) for part in zip(*[flat(cell(lane)) for lane in x], strict=True))

    assert_same(tuple(t.detach() for t in run()), tuple(t.detach() for t in loop()))
    assert_same(gradients(cell, run), gradients(cell, loop))


def test_fused_lstm_cell():
    aten = torch.ops.aten
    cell = nn.LSTMCell(3, 4).double()
    x, h, c = (torch.randn(5, 2, n, dtype=torch.float64, requires_grad=True) for n in (3, 4, 4))

    def gates(x, h):
        return x @ cell.weight_ih.T + cell.bias_ih, h @ cell.weight_hh.T + cell.bias_hh

    fused = vmap(lambda x, h, c: aten._thnn_fused_lstm_cell(*gates(x, h), c)[:2])(x, h, c)
    want = cell(x.flatten(0, 1), (h.flatten(0, 1), c.flatten(0, 1)))
    assert_same(tuple(t.flatten(0, 1).detach() for t in fused), tuple(t.detach() for t in want))

    def backward(x, h, c):
        left, right = gates(x, h)
        h_next, c_next, workspace = aten._thnn_fused_lstm_cell(left, right, c)
        return aten._thnn_fused_lstm_cell_backward_impl(2 * h_next, 2 * c_next, c, c_next, workspace, True)

    drive, grad_c, bias = vmap(backward)(x, h, c)
    total = sum(t.square().sum() for t in cell(x.flatten(0, 1), (h.flatten(0, 1), c.flatten(0, 1))))
    want_bias, want_c = torch.autograd.grad(total, (cell.bias_ih, c))
    assert_same((bias.sum(0).detach(), grad_c.detach()), (want_bias, want_c))
    assert_same(
        (drive @ cell.weight_ih).detach(),
        torch.autograd.grad(
            sum(t.square().sum() for t in cell(x.flatten(0, 1), (h.flatten(0, 1), c.flatten(0, 1)))), x
        )[0],
    )


def test_fused_gru_cell():
    aten = torch.ops.aten
    cell = nn.GRUCell(3, 4).double()
    x, h = (torch.randn(5, 2, n, dtype=torch.float64, requires_grad=True) for n in (3, 4))

    def gates(x, h):
        return x @ cell.weight_ih.T, h @ cell.weight_hh.T

    def backward(x, h):
        h_next, workspace = aten._thnn_fused_gru_cell(*gates(x, h), h, cell.bias_ih, cell.bias_hh)
        return h_next, *aten._thnn_fused_gru_cell_backward(2 * h_next, workspace, True)

    h_next, inputs, hidden, grad_h, *biases = vmap(backward)(x, h)
    want = cell(x.flatten(0, 1), h.flatten(0, 1))
    assert_same(h_next.flatten(0, 1).detach(), want.detach())
    wants = torch.autograd.grad(want.square().sum(), (cell.bias_ih, cell.bias_hh, x, h))
    assert_same(tuple(b.sum(0).detach() for b in biases), wants[:2])
    assert_same((inputs @ cell.weight_ih).detach(), wants[2])
    assert_same((grad_h + hidden @ cell.weight_hh).detach(), wants[3])
