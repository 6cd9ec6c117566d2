"""Arguments of a wrong kind: the error names the operator and the argument."""

import numpy as np
import pytest
import torch
from torch import nn

from lanewise import associative_scan, cond, fori_loop, map, scan, switch, vmap, while_loop

X = torch.tensor(1.0)
XS = torch.tensor([1.0, -2.0, 3.0])


def same(*args):
    return args[-1]


REFUSED = {
    "cond: true_fn must be a function, got <class 'int'>": lambda: cond(X > 0, 3, same, (X,)),
    "cond: false_fn must be a function, got <class 'int'>": lambda: cond(X > 0, same, 3, (X,)),
    "cond: operands must be a sequence of arguments, got <class 'int'>": lambda: cond(True, same, same, 3),
    "cond: operands must be a sequence of arguments, got a tensor": lambda: cond(True, same, same, X),
    "switch: branches must be a sequence of functions, got <class 'function'>": lambda: switch(0, same, X),
    r"switch: branches\[1\] must be a function, got <class 'int'>": lambda: switch(0, [same, 3], X),
    "switch: index must be a whole number, or a tensor of one, got <class 'str'>": lambda: switch("a", [same], X),
    "switch: there are no branches": lambda: switch(0, [], X),
    "while_loop: cond_fun must be a function, got <class 'int'>": lambda: while_loop(3, same, X),
    "while_loop: body_fun must be a function, got <class 'int'>": lambda: while_loop(same, 3, X),
    "while_loop: mode is 'foo'": lambda: while_loop(same, same, X, mode="foo"),
    "fori_loop: lower must be a whole number, or a tensor of one, got": lambda: fori_loop("a", 3, same, X),
    "fori_loop: upper must be a whole number, or a tensor of one, got": lambda: fori_loop(0, 2.5, same, X),
    "fori_loop: body_fun must be a function, got <class 'int'>": lambda: fori_loop(0, 2, 3, X),
    "scan: f must be a function, got <class 'int'>": lambda: scan(3, X, XS),
    r"scan: xs are tensors with one first dim.*they are \['int'\], length=None": lambda: scan(same, X, 3),
    "map: f must be a function, got <class 'int'>": lambda: map(3, XS),
    r"map: xs are tensors with one first dim, that of the steps; they are \['int'\]\n": lambda: map(same, 3),
    r"map: xs are tensors with one first dim, that of the steps; they are \[\[\]\]\n": lambda: map(same, X),
    "associative_scan: fn must be a function, got <class 'int'>": lambda: associative_scan(3, XS),
    r"associative_scan: elems are tensors with a dim 0; they are \['int'\]": lambda: associative_scan(torch.add, 3),
    r"associative_scan: elems are tensors with a dim 0; they are \[\[\]\]": lambda: associative_scan(torch.add, X),
    r"associative_scan: elems are tensors with a dim 1; they are \[\[3\]\]": lambda: associative_scan(
        torch.add, XS, axis=1
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_the_error_names_the_argument(text):
    with pytest.raises((TypeError, ValueError), match=text) as caught:
        REFUSED[text]()
    assert "Write instead:" in str(caught.value)
    with pytest.raises((TypeError, ValueError), match=text):
        vmap(lambda _: REFUSED[text]())(XS)


def test_what_is_as_good_as_a_number_or_a_list():
    layers = nn.ModuleList([nn.Identity(), nn.Tanh()])
    assert switch(np.int64(1), layers, X) == X.tanh()
    assert switch(torch.tensor(1), layers, X) == X.tanh()
    assert fori_loop(np.int64(0), np.int64(3), lambda _, x: x + 1, X) == 4
    assert vmap(lambda x: switch(int(x > 0), layers, x))(XS).tolist() == [XS[0].tanh(), -2.0, XS[2].tanh()]
    assert vmap(lambda x: fori_loop(0, int(x.abs()), lambda _, y: y + 1, x))(XS).tolist() == [2.0, 0.0, 6.0]
