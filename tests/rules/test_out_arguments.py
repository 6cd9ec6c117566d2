"""`out=` of every kind: of another dtype, of another shape, of none, for operations that torch makes of others, too."""

import pytest
import torch

from lanewise import jvp, vmap
from tests.oracles import assert_same

D = torch.float64
MATRICES = torch.randn(3, 2, 2, dtype=D, generator=torch.Generator().manual_seed(0))
POSITIVE = MATRICES @ MATRICES.mT + torch.eye(2, dtype=D)

OPERATIONS = {
    "add": lambda a, **out: torch.add(a, a, **out),
    "addr": lambda a, **out: torch.addr(a, a[0], a[1], **out),
    "arctan2": lambda a, **out: torch.arctan2(a, a + 1, **out),
    "cat": lambda a, **out: torch.cat([a, a], 1, **out),
    "cholesky": lambda a, **out: torch.linalg.cholesky(a, **out),
    "cumprod": lambda a, **out: torch.cumprod(a, 1, **out),
    "cumsum": lambda a, **out: torch.cumsum(a, 1, **out),
    "det": lambda a, **out: torch.linalg.det(a, **out),
    "div": lambda a, **out: torch.div(a, a[0] + 3, **out),
    "eigvalsh": lambda a, **out: torch.linalg.eigvalsh(a, **out),
    "full": lambda a, **out: torch.full((2, 3), 1.5, **out) + a.sum(),
    "heaviside": lambda a, **out: torch.heaviside(a, a[0], **out),
    "index_select": lambda a, **out: torch.index_select(a, 0, torch.tensor([0]), **out),
    "inner": lambda a, **out: torch.inner(a, a[0], **out),
    "inv": lambda a, **out: torch.linalg.inv(a, **out),
    "isposinf": lambda a, **out: torch.isposinf(a, **out),
    "kron": lambda a, **out: torch.kron(a, a, **out),
    "linspace": lambda a, **out: torch.linspace(a[0, 0], a[0, 1], 4, **out),
    "matmul": lambda a, **out: torch.matmul(torch.stack([a, a]), a, **out),
    "mean": lambda a, **out: torch.mean(a, 0, **out),
    "msort": lambda a, **out: torch.msort(a, **out),
    "mul": lambda a, **out: torch.mul(a, a[0], **out),
    "norm": lambda a, **out: torch.linalg.norm(a, **out),
    "outer": lambda a, **out: torch.outer(a[0], a[1], **out),
    "prod": lambda a, **out: torch.prod(a, 0, **out),
    "quantile": lambda a, **out: torch.quantile(a, 0.3, **out),
    "solve": lambda a, **out: torch.linalg.solve(a, a[0], **out),
    "sum": lambda a, **out: torch.sum(a, 0, **out),
    "svdvals": lambda a, **out: torch.linalg.svdvals(a, **out),
    "xlogy": lambda a, **out: torch.xlogy(a, a.abs(), **out),
}
TARGETS = {
    "empty": lambda dtype: torch.empty(0, dtype=dtype),
    "longer": lambda dtype: torch.zeros(5, dtype=dtype),
    "scalar": lambda dtype: torch.empty((), dtype=dtype),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_target_is_resized_and_written(name, target):
    for dtype in (D, torch.float32, torch.complex128, torch.int64):

        def f(a, dtype=dtype):
            return OPERATIONS[name](a, out=TARGETS[target](dtype))

        try:
            want = torch.stack([f(a) for a in POSITIVE])
        except (RuntimeError, TypeError) as error:  # of a dtype that torch does not write to
            with pytest.raises(type(error)):
                vmap(f)(POSITIVE)
            with pytest.raises(type(error)):
                jvp(f, (POSITIVE[0],), (POSITIVE[0],))
            continue
        assert_same(vmap(f)(POSITIVE), want)
        assert_same(vmap(vmap(f))(POSITIVE[None]), want[None])


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", ["div", "inv", "cumsum", "kron", "matmul", "mul", "sum"])
def test_a_target_has_a_tangent(name):
    def f(a):
        return OPERATIONS[name](a, out=torch.empty(0, dtype=D))

    want = jvp(OPERATIONS[name], (POSITIVE[0],), (MATRICES[0],))
    assert_same(jvp(f, (POSITIVE[0],), (MATRICES[0],)), want)
    assert_same(vmap(lambda a, t: jvp(f, (a,), (t,)))(POSITIVE[:1], MATRICES[:1]), tuple(x[None] for x in want))


@pytest.mark.parametrize("sum_of", [torch.sum, torch.cumsum, torch.prod, torch.cumprod, torch.mean, torch.nansum])
def test_sums_are_taken_in_the_dtype_of_the_target(sum_of):
    thirds = torch.full((2, 5), 1 / 3)
    f = lambda x: sum_of(x, 0, out=torch.empty(0, dtype=D))
    assert torch.equal(vmap(f)(thirds), torch.stack([f(x) for x in thirds]))


def test_a_target_that_cannot_hold_the_result():
    with pytest.raises(RuntimeError, match="can't be cast to the desired output type"):
        vmap(lambda a: torch.mul(a, a, out=torch.empty(0, dtype=torch.int64)))(MATRICES)


def test_several_targets():
    def f(a):
        values, places = torch.empty(0, dtype=D), torch.empty(0, dtype=torch.int64)
        torch.max(a, 0, out=(values, places))
        vectors = torch.empty(0, dtype=D)
        torch.linalg.eigh(a, out=(torch.empty(0, dtype=D), vectors))
        return values, places, vectors.abs()

    assert_same(vmap(f)(POSITIVE), tuple(torch.stack(column) for column in zip(*map(f, POSITIVE))))
