"""The strides of lanes that parted are those of an example: whether `reshape` gives a view depends on them."""

import pytest
import torch

from lanewise import vmap

F64 = torch.float64


@pytest.fixture(params=["converted", "as written"], autouse=True)
def way(request, monkeypatch):
    """Lanes part in converted code, or the function is run again."""
    if request.param == "as written":
        monkeypatch.setattr("lanewise._control.runs.split.converted", lambda func: None)


def in_a_branch(x):
    y = x * 1
    if x.sum() > 0:
        y = y * 1
        y.reshape(-1).zero_()
    return y


def after_a_branch(x):
    y = x * 2 if x.sum() > 0 else x * 3
    y.reshape(-1).zero_()
    return y


def after_three_ways(x):
    total = x.sum()
    y = x * 2 if total > 1 else x * 3 if total > 0 else x * 4 if total > -1 else x * 5 if total > -2 else x * 6
    y.contiguous().zero_()
    return y


def in_a_loop(x):
    y = x * 1
    for _ in range(int(x.sum() > 0) + 1):
        y = y * 0.5
        y.flatten().add_(1)
    return y


def asks_for_strides(x):
    if x.sum() > 0:
        return x * float((x * 1).is_contiguous()) + (x * 1).stride(0)
    return x


LAYOUTS = {
    "in order": lambda xs: xs,
    "transposed": lambda xs: xs.mT.contiguous().mT,
    "channels last": lambda xs: xs.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "a part": lambda xs: xs.mT.contiguous().mT[:, :1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("f", [in_a_branch, after_a_branch, after_three_ways, in_a_loop, asks_for_strides])
def test_reshape_is_a_view_where_it_is_for_an_example(f, layout):
    xs = LAYOUTS[layout](torch.randn(12, 2, 3, 4, dtype=F64, generator=torch.Generator().manual_seed(2)))
    want = torch.stack([f(x) for x in xs])
    torch.testing.assert_close(vmap(f)(xs), want, rtol=1e-12, atol=1e-12)
