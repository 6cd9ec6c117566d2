"""What torch.func refuses or gets wrong, and Lanewise does: the rows of the README's table, each against an oracle.

A row is a pair of programs: one with the peer that raises (or returns a wrong number), and one with Lanewise.
"""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lanewise as lw

README = Path(__file__).parents[1] / "README.md"
func = torch.func
xs = torch.linspace(-1, 2, 12).reshape(4, 3)
x = xs[1]


def close(actual, expected):
    torch.testing.assert_close(actual, expected)


class OldSquare(torch.autograd.Function):
    """An autograd.Function of the old style: no setup_context, no vmap staticmethod."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class SquareWithJvp(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad

    @staticmethod
    def jvp(ctx, tangent):
        return 2 * ctx.saved_tensors[0] * tangent


def custom_function(lib):
    close(lib.vmap(lib.grad(lambda x: OldSquare.apply(x).sum()))(xs), 2 * xs)


def checkpointing(lib):
    def loss(x):
        return checkpoint(torch.sin, x, use_reentrant=False).sum()

    close(lib.vmap(lib.grad(loss))(xs), xs.cos())


def autograd_inside(lib):
    def derivative(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.sin().sum(), x)[0]

    close(lib.vmap(derivative)(xs), xs.cos())


def autograd_functional(lib):
    def jacobian(x):
        return torch.autograd.functional.jacobian(torch.sin, x)

    close(lib.vmap(jacobian)(xs), torch.diag_embed(xs.cos()))


def factory(lib):
    def row(x):
        out = torch.zeros(5)
        out[1:4] = x
        return out

    close(lib.vmap(row)(xs), nn.functional.pad(xs, (1, 1)))


def masked_assignment(lib):
    def relu(x):
        x = x.clone()
        x[x < 0] = 0
        return x

    close(lib.vmap(relu)(xs), xs.clamp(min=0))


def equal_counts(lib):
    where = lib.vmap(lambda x: (x == x.max()).nonzero())(xs)
    close(where, torch.full((4, 1, 1), 2))
    close(lib.vmap(lambda x: x[x < x.max()])(xs), xs[:, :2])


def out_argument(lib):
    def shifted(x):
        result = torch.empty(3)
        torch.add(x, 1, out=result)
        return result

    close(lib.vmap(shifted)(xs), xs + 1)


def recurrent(lib):
    lstm = nn.LSTM(3, 2)
    sequences = torch.randn(4, 6, 3)
    expected = torch.stack([lstm(sequence)[0] for sequence in sequences])
    close(lib.vmap(lambda sequence: lstm(sequence)[0])(sequences), expected)


def mapped_kwargs(lib):
    result = lib.vmap(lambda x, *, w: x @ w, in_dims={"x": 0, "w": 1})(x=xs, w=xs.T)
    close(result, (xs * xs).sum(-1))


def axis_size(lib):
    result = lib.vmap(lambda: torch.arange(3), in_dims=(), axis_size=2)()
    close(result, torch.arange(3).expand(2, 3))


def other_outputs(lib):
    out, name = lib.vmap(lambda x: (x + 1, "shifted"))(xs)
    close(out, xs + 1)
    assert name == "shifted"


def other_aux(lib):
    gradient, aux = lib.grad(lambda x: (x.sin().sum(), "note"), has_aux=True)(x)
    close(gradient, x.cos())
    assert aux == "note"


def complex_jacobian(lib):
    z = torch.tensor([1 + 2j, 0.5 - 1j])
    close(lib.jacrev(lambda z: z * z)(z), (2 * z).diag())
    close(lib.jacfwd(lambda z: z * z)(z), (2 * z).diag())


def chunks_in_forward_mode(lib):
    close(lib.jacfwd(torch.sin, chunk_size=2)(x), x.cos().diag())
    close(lib.hessian(lambda x: x.sin().sum(), chunk_size=2)(x), (-x.sin()).diag())


def hessian_aux(lib):
    hessian, aux = lib.hessian(lambda x: (x.sin().sum(), x.sum()), has_aux=True)(x)
    close(hessian, (-x.sin()).diag())
    close(aux, x.sum())


def chunks_and_out_dims(lib):
    shared, mapped = lib.vmap(lambda x: (torch.ones(2), x), out_dims=(None, 0), chunk_size=2)(xs)
    close(shared, torch.ones(2))
    close(mapped, xs)
    assert lib.vmap(torch.sin, chunk_size=2)(xs[:0]).shape == (0, 3)


def branch_in_linearize(lib):
    def f(x):
        return x.sin() if x.sum() > 0 else x.cos()

    positive = torch.tensor([1.0, 2.0])
    close(lib.linearize(f, positive)[1](torch.ones(2)), positive.cos())


def linearize_differentiated(lib):
    def slope(x):
        return lib.linearize(torch.sin, x)[1](torch.ones(3)).sum()

    close(lib.grad(slope)(x), -x.sin())


def dropout_in_linearize(lib):
    wide = torch.ones(100)
    out, tangent = lib.linearize(lambda x: nn.functional.dropout(x, 0.5), wide)
    close(tangent(wide), out)


def forward_over_forward_of_a_function(lib):
    one = torch.tensor([3.0])
    close(lib.jacfwd(lib.jacfwd(SquareWithJvp.apply))(one), torch.full((1, 1, 1), 2.0))


def forward_mode_of_cdist(lib):
    def f(x):
        return torch.cdist(x.reshape(3, 1), torch.tensor([[10.0], [20.0]])).sum()

    close(lib.jvp(f, (x,), (torch.ones(3),))[1], torch.tensor(-6.0))


def buffers_in_two_dicts(lib):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count = self.count + 1
            return x * self.weight

    buffers = {"count": torch.tensor(5.0)}
    lib.functional_call(Counts(), ({"weight": torch.ones(1)}, buffers), torch.ones(1))
    close(buffers["count"], torch.tensor(6.0))


def shared_submodule(lib):
    first = nn.Linear(2, 2)
    net = nn.Sequential(first, first)
    own = first.weight
    lib.functional_call(net, {"0.weight": torch.eye(2)}, torch.ones(2))
    assert first.weight is own, "the module keeps a tensor that was given for one call"


def control_flow(lib):
    def root(a):
        if a < 0:
            return torch.zeros_like(a)
        x = a
        while (x * x - a).abs() > 1e-6 * a:
            x = 0.5 * (x + a / x)
        return x

    a = torch.tensor([2.0, -1.0, 9.0, 400.0])
    close(lib.vmap(root)(a), a.clamp(min=0).sqrt())
    close(lib.vmap(lib.grad(root))(a), torch.where(a > 0, 0.5 / a.abs().sqrt(), 0.0))


def lane_numbers(lib):
    def power(x, n):
        out = torch.ones(())
        for _ in range(int(n)):
            out = out * x
        return out * n.item()

    n = torch.tensor([0, 3, 1, 2])
    close(lib.vmap(power)(xs[:, 0], n), xs[:, 0] ** n * n)


def unequal_counts(lib):
    close(lib.vmap(lambda x: x[x > 0].sum())(xs), xs.clamp(min=0).sum(1))


def ragged_results(lib):
    out = lib.vmap(lambda x: x[x > 0], out_dims="list")(xs)
    for row, x in zip(out, xs, strict=True):
        close(row, x[x > 0])


WRONG = "not close|the module keeps"

# torch's own words for out_dims=None, which reaches an operation as a dim, and for checkpoint, in different versions.
NO_DIM = "'dim' must be int, not NoneType" if torch.__version__ >= (2, 13) else "Please look up dimensions by name"
NO_CHECKPOINT = "don't yet support saved tensor hooks" if torch.__version__ >= (2, 12) else "vmap over _NoopSaveInputs"

# Title in the README, the program, and what the peer raises (or that its numbers are wrong).
ROWS = {
    "`if`, `while` and `return` by the values of each lane": (control_flow, "data-dependent control flow"),
    "`range(int(n))` and `.item()` with a number of each lane": (lane_numbers, "calling .item"),
    "`x[mask]` that keeps another number in each lane": (unequal_counts, "dynamic shape"),
    '`out_dims="list"` for results of different shapes': (ragged_results, "`out_dims` must be an int"),
    "`autograd.Function` without `setup_context` or `vmap`": (custom_function, "must override the setup_context"),
    "`torch.utils.checkpoint` inside": (checkpointing, NO_CHECKPOINT),
    "`torch.autograd.grad` and `.requires_grad_()` inside": (
        autograd_inside,
        "attempting to call Tensor.requires_grad_",
    ),
    "`torch.autograd.functional` inside": (autograd_functional, "attempting to call Tensor.requires_grad_"),
    "writing lanes into `torch.zeros(...)` made inside": (factory, "inplace arithmetic.* is not possible"),
    "`x[mask] = value`": (masked_assignment, "Attempting to batch over indexing with a boolean mask"),
    "`nonzero` and `x[mask]` where all lanes keep equally many": (equal_counts, "output dynamic shape"),
    "`out=`": (out_argument, "doesn't work on out="),
    "`nn.LSTM` of one example": (recurrent, "Batching rule not implemented for aten::lstm"),
    "`in_dims` by the names of arguments, keywords among them": (mapped_kwargs, "expected `in_dims` to be int or a"),
    "no mapped argument (`axis_size=`)": (axis_size, "unexpected keyword argument 'axis_size'"),
    "outputs of `vmap` that are no tensors": (other_outputs, "must only return Tensors"),
    "aux of `grad` that is no tensor": (other_aux, "Expected tensors, got unsupported type"),
    "Jacobians of complex functions": (complex_jacobian, "Expected all inputs to be real"),
    "`chunk_size` in `jacfwd` and `hessian`": (chunks_in_forward_mode, "unexpected keyword argument 'chunk_size'"),
    "`has_aux` in `hessian`": (hessian_aux, "unexpected keyword argument 'has_aux'"),
    "`chunk_size` with `out_dims=None`, or without examples": (chunks_and_out_dims, NO_DIM),
    "a Python branch in `linearize`": (branch_in_linearize, "trying to get value out of a tracing tensor"),
    "`grad` of a function that uses `linearize`": (linearize_differentiated, WRONG),
    "dropout in `linearize`": (dropout_in_linearize, WRONG),
    "`jacfwd(jacfwd(f))` with a custom `jvp`": (forward_over_forward_of_a_function, WRONG),
    "forward mode through `cdist`": (forward_mode_of_cdist, "has not been implemented yet"),
    "rebound buffers with two dicts in `functional_call`": (buffers_in_two_dicts, WRONG),
    "a module with a submodule under two names, after `functional_call`": (shared_submodule, WRONG),
}
NAMES = [program.__name__ for program, _ in ROWS.values()]


@pytest.mark.parametrize("row", ROWS.values(), ids=NAMES)
def test_lanewise_does_it(row):
    program, _ = row
    program(lw)


@pytest.mark.parametrize("row", ROWS.values(), ids=NAMES)
def test_the_peer_does_not(row):
    """If a later torch does it, its row leaves the table."""
    program, phrase = row
    with warnings.catch_warnings(), pytest.raises(Exception, match=phrase):
        warnings.simplefilter("ignore")
        program(func)


def test_the_readme_lists_these_rows():
    table = README.read_text().split("## What torch.func refuses and Lanewise does")[1].split("\n## ")[0]
    titles = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    assert titles == list(ROWS)
