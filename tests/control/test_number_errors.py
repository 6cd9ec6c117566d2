"""What Python refuses to do with the number of one lane: the error of the loop, which names the lane."""

import math

import pytest
import torch

from lanewise import vmap

KS = torch.tensor([3, 1, 0, -2, 2])

# Some of the lanes fail, most often those with 0 or -2.
REFUSED = {
    "div": lambda k: 6 / int(k),
    "floor div": lambda k: 6 // int(k),
    "mod": lambda k: 6 % int(k),
    "divmod": lambda k: divmod(6, int(k))[1],
    "float mod": lambda k: 6.5 % float(k),
    "float floor div": lambda k: 6.5 // float(k),
    "complex div": lambda k: abs(1j / int(k)),
    "div by a truth": lambda k: 5 / bool(k),
    "sqrt": lambda k: math.sqrt(int(k)),
    "isqrt": lambda k: math.isqrt(int(k)),
    "log": lambda k: math.log(float(k)),
    "acos": lambda k: math.acos(float(k) / 3 - 0.5),
    "factorial": lambda k: math.factorial(int(k)),
    "comb": lambda k: math.comb(5, int(k)),
    "infinity": lambda k: int(math.inf if k < 0 else 1.0),
    "nan": lambda k: int(math.nan if k < 0 else 1.0),
    "round nan": lambda k: round(math.nan if k < 0 else 1.5),
    "left shift": lambda k: 1 << int(k),
    "right shift": lambda k: 100 >> int(k),
    "range of a float": lambda k: sum(range(float(k))),  # type: ignore[call-overload]
    "range by zero": lambda k: sum(range(0, 10, int(k))),
    "power of zero": lambda k: 0.0 ** int(k),
    "whole power of zero": lambda k: 0 ** int(k),
    "list": lambda k: [1.0, 2.0][int(k) - 1],
    "list from behind": lambda k: [1.0, 2.0][-int(k)],
    "tuple": lambda k: (1.0,)[int(k) + 1 if k < 1 else 0],
    "text": lambda k: ord("abcd"[int(k) * 3 if k < 0 else 0]),
    "index": lambda k: [3, 1, 2, -2].index(int(k)),
    "pop": lambda k: [1.0].pop(int(k) if k < 0 else 0),
    "slice by zero": lambda k: len([1, 2, 3][:: int(k)]),
    "key": lambda k: {3: 1.0, 1: 2.0, 2: 4.0, -2: 3.0}[int(k)],
    "chr": lambda k: ord(chr(int(k))),
    "bytes": lambda k: len(bytes(int(k))),
    "exp": lambda k: math.exp(float(k) * -500),
    "next": lambda k: next(i for i in range(1, 5) if i == abs(int(k))),
    "pow of three": lambda k: pow(int(k), -1, 7),
}


def first_error(f, ks):
    failing = []
    for place, k in enumerate(ks):
        try:
            f(k)
        except Exception as error:
            failing.append((place, error))
    return failing


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("way", ["vmap", "chunks", "inside"])
@pytest.mark.parametrize("name", REFUSED)
def test_the_error_of_the_loop(name, way):
    f = lambda k: torch.tensor(REFUSED[name](k))
    failing = first_error(f, KS)
    with pytest.raises(type(failing[0][1])) as caught:
        if way == "inside":
            vmap(vmap(f))(KS[None])
        else:
            vmap(f, chunk_size=2 if way == "chunks" else None)(KS)
    if len(failing) < len(KS):
        lanes = [lane[-1] if isinstance(lane, tuple) else lane for lane in caught.value.lanes]  # type: ignore[attr-defined]
        assert set(lanes) <= {place for place, _ in failing}
        assert str(caught.value) == str(failing[[place for place, _ in failing].index(lanes[0])][1])
    else:
        assert str(caught.value) == str(failing[0][1])


@pytest.mark.parametrize(
    "f",
    [
        lambda k: round(int(k) * 7, -1),
        lambda k: round(int(k), 2),
        lambda k: round(float(k) / 7, 2),
        lambda k: round(float(k) * 70, -1),
        lambda k: round(bool(k), 1),
        lambda k: round(float(k) / 2),
        lambda k: pow(int(k), 2, 5),
        lambda k: len(bin(int(k)) + hex(int(k)) + format(int(k), "04d")),
        lambda k: (int(k) * 2**62) // 2**60,
        lambda k: int(float(k) * 1e19) // 10**17,
        lambda k: len("ab" * int(k)) + len([1, 2] * int(k)),
    ],
)
def test_numbers_of_the_loop(f):
    want = torch.stack([torch.tensor(f(k)) for k in KS])
    for run in (vmap(lambda k: torch.tensor(f(k))), vmap(lambda k: torch.tensor(f(k)), chunk_size=2)):
        torch.testing.assert_close(run(KS), want)


# A number in some lanes, given to what takes tensors only.
NO_TENSOR = {
    "function": lambda x: torch.sin(x[0] if x[0] > 0 else 0.5),
    "second operand": lambda x: torch.maximum(x[1], x[0] if x[0] > 0 else 0.5),
    "method": lambda x: (x[0] if x[0] > 0 else 0.5).sin(),
    "of a product": lambda x: torch.sin((x[0] if x[0] > 0 else 0.5) * 2),
    "list": lambda x: torch.stack([x[0] if x[0] > 0 else 0.5, x[1]]),
    "like": lambda x: x[0] * torch.zeros_like(x[0] if x[0] > 0 else 0.5),
}


@pytest.mark.parametrize("name", NO_TENSOR)
def test_a_number_is_no_tensor(name):
    f = NO_TENSOR[name]
    xs = torch.tensor([[1.0, 2.0], [-1.0, 0.5], [2.0, 3.0]])
    [(place, error)] = first_error(f, xs)
    for _ in range(3):
        with pytest.raises(type(error)) as caught:
            vmap(f)(xs)
        assert str(error) in str(caught.value) and caught.value.lanes == [place]
    good = vmap(f)(xs.abs())
    torch.testing.assert_close(good, torch.stack([f(x) for x in xs.abs()]))
