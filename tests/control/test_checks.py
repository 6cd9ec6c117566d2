"""`error_if`, `debug.print`, and the lanes that errors name."""

import pytest
import torch

import lanewise
from lanewise import error_if, errors, grad, jacrev, jvp, vmap

XS = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0])


def check(x):
    return error_if(x, x < -3, "too low") * 2


def check_in_a_branch(x):
    return check(x) if x < 0 else x


def raises(x):
    if x < -3:
        raise ValueError("too low")
    return x * 2


FUNCTIONS = [check, check_in_a_branch, raises]

WAYS = {
    "vmap": lambda f: vmap(f)(XS),
    "chunks": lambda f: vmap(f, chunk_size=2)(XS),
    "vmap(grad)": lambda f: vmap(grad(f))(XS),
    "grad(vmap)": lambda f: grad(lambda xs: vmap(f)(xs).sum())(XS),
    "jvp(vmap)": lambda f: jvp(vmap(f), (XS,), (XS,)),
    "vmap(jvp)": lambda f: vmap(lambda x: jvp(f, (x,), (x,)))(XS),
    "vmap(jacrev), chunks": lambda f: vmap(jacrev(f), chunk_size=3)(XS),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_an_error_names_its_lane(f, way):
    with pytest.raises(errors.CheckError if f is not raises else ValueError, match="too low") as caught:
        WAYS[way](f)
    assert caught.value.lanes == [3]  # type: ignore[attr-defined]


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_an_error_in_nested_vmaps_names_pairs(f, chunk_size):
    with pytest.raises(errors.CheckError if f is not raises else ValueError) as caught:
        vmap(lambda x: vmap(lambda y: f(x + y), chunk_size=chunk_size)(XS))(torch.tensor([9.0, 9.0, 0.0, 9.0]))
    assert caught.value.lanes == [(2, 3)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_pairs_of_an_outer_chunk(f):
    with pytest.raises(errors.CheckError if f is not raises else ValueError) as caught:
        vmap(lambda x: vmap(lambda y: f(x + y))(XS), chunk_size=2)(torch.tensor([9.0, 9.0, 9.0, 0.0]))
    assert caught.value.lanes == [(3, 3)]  # type: ignore[attr-defined]


def test_shapes_that_differ_in_a_later_chunk():
    with pytest.raises(RuntimeError, match=r"lane 4 gives \[2\], lane 5 gives \[1\]"):
        vmap(lambda x: torch.stack([x, x]) if x > 0 else x[None], chunk_size=2)(torch.tensor([1.0, 1, 1, 1, 1, -1]))


def test_what_a_check_hands_through():
    x = torch.ones(3)
    assert error_if(x, x.sum() < 0, "no") is x
    assert error_if("text", False, "no") == "text"
    with pytest.raises(errors.CheckError, match="no") as caught:
        error_if(x, x > 0, "no")
    assert caught.value.lanes == []
    with pytest.raises(errors.CheckError, match=r"no \(lanes 1, 3\)"):
        vmap(lambda x: error_if(x, x < 0, "no"))(XS.repeat(2, 1).T)


def test_print_of_each_lane(capsys):
    vmap(lambda x: lanewise.debug.print("{} of {kind}", x, kind="lane"))(XS[:2])
    assert capsys.readouterr().out == "1.0 of lane\n-2.0 of lane\n"
    vmap(lambda x: vmap(lambda y: lanewise.debug.print("{:.0f} {:.0f}", x, y))(XS[:2]))(XS[2:4])
    assert capsys.readouterr().out == "3 1\n3 -2\n-4 1\n-4 -2\n"
    vmap(grad(lambda x: (lanewise.debug.print("{}", x), x * x)[1]))(XS[:1])
    assert capsys.readouterr().out == "1.0\n"
    lanewise.debug.print("{}", XS[0])
    assert capsys.readouterr().out == "1.0\n"


def test_print_in_a_branch(capsys):
    def f(x):
        if x < 0:
            lanewise.debug.print("low {}", x)
        return x

    vmap(f)(XS)
    capsys.readouterr()
    vmap(f)(XS)
    assert capsys.readouterr().out == "low -2.0\nlow -4.0\n"
