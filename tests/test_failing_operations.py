"""What an operation says that does not take its operands: what it says of one example, in a loop over them."""

import re
import sys
import traceback

import pytest
import torch
import torch.nn.functional as F

from lanewise import errors, grad, jvp, vmap
from lanewise._core.batch import BatchLevel

torch.manual_seed(0)
xs, ms = torch.rand(4, 5), torch.rand(4, 3, 5)
w, three, indices = torch.rand(6, 7), torch.rand(3), torch.tensor([0, 9])

WRONG = {
    # products
    "mm of a vector": lambda x, m: torch.mm(x, w),
    "mm": lambda x, m: torch.mm(m, w),
    "vector @ matrix": lambda x, m: x @ w,
    "matrix @ matrix": lambda x, m: m @ w,
    "captured @ vector": lambda x, m: w @ x,
    "mv": lambda x, m: torch.mv(w, x),
    "mv of a vector": lambda x, m: torch.mv(x, torch.ones(5)),
    "mv of matrices": lambda x, m: torch.mv(m, torch.ones(5, 2)),
    "dot": lambda x, m: torch.dot(x, three),
    "bmm": lambda x, m: torch.bmm(m[None], m[None]),
    "addmm": lambda x, m: torch.addmm(x, m, w),
    "baddbmm": lambda x, m: torch.baddbmm(m[None], m[None], m[None]),
    "outer": lambda x, m: torch.outer(m, x),
    "einsum": lambda x, m: torch.einsum("ij,jk->ik", m, w),
    "tensordot": lambda x, m: torch.tensordot(m, w, 1),
    "linear": lambda x, m: F.linear(x, w),
    "linear, bias": lambda x, m: F.linear(x, torch.ones(3, 5), torch.ones(4)),
    "dtypes": lambda x, m: m @ torch.ones(5, 2, dtype=torch.long),
    # elementwise
    "add": lambda x, m: x + three,
    "add, captured first": lambda x, m: three + x,
    "mul": lambda x, m: m * m.T,
    "where": lambda x, m: torch.where(x > 0, x, three),
    "lerp": lambda x, m: torch.lerp(x, three, 0.5),
    "addcmul": lambda x, m: torch.addcmul(x, x, three),
    "bits of floats": lambda x, m: x & 1,
    "complex": lambda x, m: torch.complex(x, x.double()),
    # reductions
    "sum": lambda x, m: x.sum(3),
    "max": lambda x, m: x.max(1),
    "softmax": lambda x, m: torch.softmax(x, 2),
    "cumsum": lambda x, m: x.cumsum(2),
    "sort": lambda x, m: x.sort(3),
    "topk": lambda x, m: x.topk(9),
    "logsumexp": lambda x, m: x.logsumexp(1),
    "norm": lambda x, m: torch.linalg.vector_norm(x, dim=3),
    "mean of integers": lambda x, m: x.long().mean(),
    # indices
    "select": lambda x, m: x.select(0, 7),
    "subscript": lambda x, m: x[7],
    "too many subscripts": lambda x, m: x[1, 2],
    "index": lambda x, m: x[indices],
    "captured index": lambda x, m: xs[x.long() + 9],
    "gather": lambda x, m: x.gather(0, indices),
    "gather, dim": lambda x, m: x.gather(1, torch.tensor([0, 1])),
    "index_select": lambda x, m: x.index_select(0, indices),
    "take": lambda x, m: x.take(indices),
    "scatter": lambda x, m: x.scatter(0, indices, 1.0),
    "index_add": lambda x, m: x.index_add(0, indices, torch.ones(2)),
    "index_add, sizes": lambda x, m: x.index_add(0, torch.tensor([0, 1]), torch.ones(3)),
    "index_put": lambda x, m: x.index_put((indices,), torch.tensor(1.0)),
    "masked_fill": lambda x, m: x.masked_fill(torch.tensor([True] * 3), 0.0),
    "embedding": lambda x, m: F.embedding(x.long() + 9, w),
    "embedding of floats": lambda x, m: F.embedding(x, w),
    "searchsorted": lambda x, m: torch.searchsorted(m, x),
    "bucketize": lambda x, m: torch.bucketize(x, m),
    "bincount": lambda x, m: torch.bincount(x),
    # shapes
    "view": lambda x, m: x.view(3, 2),
    "reshape": lambda x, m: x.reshape(3, 2),
    "expand": lambda x, m: x.expand(3, 4),
    "transpose": lambda x, m: x.transpose(0, 1),
    "permute": lambda x, m: m.permute(0, 2),
    "unsqueeze": lambda x, m: x.unsqueeze(3),
    "split": lambda x, m: x.split([1, 2]),
    "unfold": lambda x, m: x.unfold(0, 9, 1),
    "cat": lambda x, m: torch.cat([x, m]),
    "stack": lambda x, m: torch.stack([x, m]),
    "roll": lambda x, m: x.roll((1, 2), (0,)),
    "rot90": lambda x, m: x.rot90(),
    "tril": lambda x, m: torch.tril(x),
    "repeat": lambda x, m: m.repeat(2),
    "copy_": lambda x, m: x.clone().copy_(three),
    "add_": lambda x, m: x.clone().add_(torch.rand(2, 5)),
    # networks
    "conv2d": lambda x, m: F.conv2d(m[None], torch.ones(2, 3, 3, 3)),
    "conv1d": lambda x, m: F.conv1d(m, torch.ones(2, 4, 2)),
    "max_pool2d": lambda x, m: F.max_pool2d(m[None], 9),
    "max_pool2d of a matrix": lambda x, m: F.max_pool2d(m, 2),
    "avg_pool2d of a vector": lambda x, m: F.avg_pool2d(x, 2),
    "upsample of a matrix": lambda x, m: torch.ops.aten.upsample_nearest1d(m, [7]),
    "pad": lambda x, m: F.pad(m, (9, 9), mode="reflect"),
    "layer_norm": lambda x, m: F.layer_norm(x, (4,)),
    "batch_norm": lambda x, m: F.batch_norm(m, torch.zeros(4), torch.ones(4)),
    "cross_entropy": lambda x, m: F.cross_entropy(m, torch.tensor([0, 1])),
    "cross_entropy, class": lambda x, m: F.cross_entropy(m, torch.tensor([0, 1, 9])),
    "mse_loss": lambda x, m: F.mse_loss(x, three),
    "binary_cross_entropy": lambda x, m: F.binary_cross_entropy(x + 3, x),
    "attention": lambda x, m: F.scaled_dot_product_attention(m[None], torch.ones(1, 3, 4), m[None]),
    "grid_sample": lambda x, m: F.grid_sample(m[None, None], torch.ones(2, 3, 4, 2)),
    "gru": lambda x, m: torch.nn.GRU(4, 2)(m),
    "ctc_loss": lambda x, m: F.ctc_loss(m, x, (3,), (2,)),
    # linear algebra
    "det": lambda x, m: torch.linalg.det(m),
    "solve": lambda x, m: torch.linalg.solve(m[:, :3], torch.ones(4)),
    "inv of zeros": lambda x, m: torch.linalg.inv(torch.zeros(3, 3) * x[0]),
    "cholesky": lambda x, m: torch.linalg.cholesky(-torch.eye(3) * (x[0] + 1)),
    "cross": lambda x, m: torch.linalg.cross(x, x),
    "fft": lambda x, m: torch.fft.fft(x, dim=2),
    # random numbers
    "multinomial": lambda x, m: torch.multinomial(-x, 2),
    "bernoulli": lambda x, m: torch.bernoulli(x + 3),
    "normal": lambda x, m: torch.normal(x, -x - 1),
}


def total(f):
    def run(x, m):
        out = f(x, m)
        return (out if isinstance(out, torch.Tensor) else out[0]).sum()

    return run


def branching(f):
    def run(x, m):
        return f(x, m) if x.sum() > -1 else x

    return run


CALLS = {
    "vmap": lambda f: vmap(f, randomness="different")(xs, ms),
    "vmap(vmap)": lambda f: vmap(vmap(f, randomness="different"), randomness="different")(xs[:2, None], ms[:2, None]),
    "vmap(grad)": lambda f: vmap(grad(total(f)), randomness="different")(xs, ms),
    "grad(vmap)": lambda f: grad(lambda x, m: vmap(total(f), randomness="different")(x, m).sum())(xs, ms),
    "jvp": lambda f: jvp(f, (xs[0], ms[0]), (xs[0], ms[0])),
    "vmap(jvp)": lambda f: vmap(lambda x, m: jvp(f, (x, m), (x, m)), randomness="different")(xs, ms),
    "a branch": lambda f: vmap(branching(f), randomness="different")(xs, ms),
    "chunks": lambda f: vmap(f, randomness="different", chunk_size=2)(xs, ms),
    "captured": lambda f: vmap(lambda x: f(x, ms[0]), randomness="different")(xs),
}


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("name", WRONG)
def test_as_of_one_example(name, how):
    """The type and the text are those of a loop, unless the text is our own, which has the user's line."""
    f = WRONG[name]
    with pytest.raises(Exception) as loop:
        f(xs[0], ms[0])
    with pytest.raises(type(loop.value)) as caught:
        CALLS[how](f)
    if isinstance(caught.value, errors.LanewiseError):
        assert __file__ in str(caught.value)
    elif how not in ("jvp", "vmap(jvp)") or name != "det":
        assert str(caught.value) == str(loop.value)


def test_a_note_names_operation_shapes_and_line():
    with pytest.raises(RuntimeError, match=re.escape("cannot be multiplied (1x5 and 6x7)")) as caught:
        vmap(WRONG["vector @ matrix"])(xs, ms)
    line = WRONG["vector @ matrix"].__code__.co_firstlineno
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == [
            "lanewise: aten.mm.default, with the shapes of one example: self [1, 5] torch.float32, mat2 [6, 7] "
            f"torch.float32\n  at {__file__}:{line}: " + '"vector @ matrix": lambda x, m: x @ w,'
        ]


def test_traceback_ends_at_the_users_line():
    with pytest.raises(RuntimeError) as caught:
        vmap(WRONG["gather"])(xs, ms)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].filename == __file__


def test_the_lane_that_fails():
    matrices = torch.eye(3).repeat(4, 1, 1)
    matrices[2] = 0
    with pytest.raises(RuntimeError) as loop:
        torch.linalg.inv(matrices[2])
    with pytest.raises(type(loop.value)) as caught:
        vmap(torch.linalg.inv)(matrices)
    assert str(caught.value) == str(loop.value)
    if sys.version_info >= (3, 11):
        assert "(lane 2)" in caught.value.__notes__[0]


def test_nothing_more_is_written_or_drawn_to_find_out():
    target, x = torch.zeros(4, 5), torch.rand(4, 5)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        vmap(lambda y, x: y.add_(1).add_(x[:2]))(target, x)
    with pytest.raises(RuntimeError):
        vmap(lambda x: torch.multinomial(-x, 2), randomness="different")(x)
    assert torch.equal(target, torch.ones(4, 5)) and torch.equal(before, torch.get_rng_state())


def test_no_memory_is_not_looked_for_again(monkeypatch):
    asked = []
    monkeypatch.setattr("lanewise._core.one_lane._first_failure", lambda *args: asked.append(args))
    with pytest.raises(RuntimeError, match="allocate memory|invalid"):
        vmap(lambda x: x.expand(2**40, 5).clone())(xs)
    assert not asked


def test_levels_without_lanes():
    with pytest.raises(RuntimeError, match=re.escape("(1x5 and 6x7)")):
        vmap(WRONG["vector @ matrix"])(xs[:0], ms[:0])


def test_success_costs_nothing(monkeypatch):
    monkeypatch.setattr(BatchLevel, "failure", None)
    vmap(lambda x: (x @ x).sin())(xs)
