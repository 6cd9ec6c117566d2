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
    "associative_scan: axis must be a whole number, got <class 'str'>": lambda: associative_scan(
        torch.add, XS, axis="0"
    ),
    r"associative_scan: fn returns another structure, \(\*, \*\), than elems have, \*": lambda: associative_scan(
        lambda a, b: (a, b), XS
    ),
    r"associative_scan: fn must keep the shapes of its arguments, \[\[1\]\], and returns a tensor \[\]": lambda: (
        associative_scan(lambda a, b: (a + b).sum(), XS)
    ),
    r"cond: pred is a bool, or a tensor with one element\. Boolean value.* its shape is \[3\]": lambda: cond(
        XS > 0, same, same, (X,)
    ),
    "cond: pred is a bool, or a tensor with one element, got <class 'NoneType'>": lambda: cond(None, same, same, (X,)),
    r"switch: index must be a whole number, or a tensor of one, got a tensor \[3\]": lambda: switch(
        XS.long(), [same], X
    ),
    r"while_loop: what cond_fun returns is a bool, or a tensor with one.* its shape is \[3\]": lambda: while_loop(
        lambda s: s < 3, same, XS
    ),
    r"what cond_fun returns is a bool, or a tensor with one element\. Boolean": lambda: while_loop(
        lambda s: s < 3, same, XS, mode="mask"
    ),
    "what cond_fun returns is a bool, or a tensor with one element, got <class 'NoneType'>": lambda: while_loop(
        lambda s: None, same, X
    ),
    r"while_loop: body_fun returns a state of another structure, \(\*, \*\), than `init` has, \*\n": lambda: while_loop(
        lambda s: s < 3, lambda s: (s, s), X
    ),
    r"while_loop: body_fun returns None where `init` is a tensor \[\]\n": lambda: while_loop(
        lambda s: s < 3, lambda s: None, X
    ),
    r"while_loop: body_fun returns a tensor \[6\] where the state has \[3\]": lambda: while_loop(
        lambda s: s.sum() < 9, lambda s: torch.cat([s, s]), XS, mode="mask"
    ),
    "while_loop: max_steps must be 0 or more, got -1": lambda: while_loop(same, same, X, max_steps=-1),
    "while_loop: max_steps must be a whole number, got 2.5": lambda: while_loop(same, same, X, max_steps=2.5),
    r"fori_loop: body_fun returns a state of another structure, \(\*, \*\), than `init` has, \*\n": lambda: fori_loop(
        0, 3, lambda i, s: (s.sin(), s), X
    ),
    r"scan: f must return a pair, the next carry and y, got a tensor \[\]": lambda: scan(torch.add, X, XS),
    "scan: f must return a pair, the next carry and y, got a tuple of 3": lambda: scan(lambda c, x: (c, x, x), X, XS),
    r"scan: f returns a state of another structure, \(\*,\), than `init` has, \*\n": lambda: scan(
        lambda c, x: ((c + x,), x), X, XS
    ),
    "scan: length must be a whole number, got 2.0": lambda: scan(same, X, None, length=2.0),
    "scan: length must be 0 or more, got -1": lambda: scan(same, X, None, length=-1),
    r"scan: .* differs in shape: f\(carry, x\)\[1\] has \[1\] in step 0, \[2\] in step 1": lambda: scan(
        lambda n, x: (n + 1, XS[:n]), 1, XS
    ),
    r"scan: .* differs in structure: f\(carry, x\)\[1\] is \(\*,\) in step 0, \(\*, \*\) in step 1": lambda: scan(
        lambda n, x: (n + 1, (x,) * n), 1, XS
    ),
    r"scan: f\(carry, x\)\[1\] has None in step 1, which no tensor can hold": lambda: scan(
        lambda n, x: (n + 1, None if n else x), 0, XS
    ),
    r"map: f\(x\) has <class 'str'> in step 0, which no tensor can hold": lambda: map(lambda x: "text", XS),
    r"map: .* differs in shape: f\(x\) has \[1\] in step 0, \[0\] in step 1": lambda: map(
        lambda x: XS[: int(x > 0)], XS
    ),
    r"map: batch_size should be None or greater than 0. \(got 0\)": lambda: map(same, XS, batch_size=0),
    "map: batch_size should be None or greater than 0. .got 'aut', neither a whole number nor \"auto\".": lambda: map(
        same, XS, batch_size="aut"
    ),
    "vmap: chunk_size should be None or greater than 0. .got 'aut', neither a whole number nor \"auto\".": lambda: vmap(
        same, chunk_size="aut"
    ),
    r"map: xs are tensors with one first dim.* they are \[\[\]\]\n": lambda: map(same, X, batch_size=2),
}


@pytest.mark.parametrize("text", REFUSED)
def test_the_error_names_the_argument(text):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=text) as caught:
        REFUSED[text]()
    assert "Write instead:" in str(caught.value)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=text):
        vmap(lambda _: REFUSED[text]())(XS)


def test_what_is_as_good_as_a_number_or_a_list():
    layers = nn.ModuleList([nn.Identity(), nn.Tanh()])
    assert switch(np.int64(1), layers, X) == X.tanh()
    assert switch(torch.tensor(1), layers, X) == X.tanh()
    assert fori_loop(np.int64(0), np.int64(3), lambda _, x: x + 1, X) == 4
    assert vmap(lambda x: switch(int(x > 0), layers, x))(XS).tolist() == [XS[0].tanh(), -2.0, XS[2].tanh()]
    assert vmap(lambda x: fori_loop(0, int(x.abs()), lambda _, y: y + 1, x))(XS).tolist() == [2.0, 0.0, 6.0]


class Done(Exception):
    """One of the user's own."""


def test_an_error_of_the_users_own_stays_where_the_state_has_grown():
    def grow(state):
        if len(state) == 3:
            raise Done
        return [*state, state[-1] + 1]

    with pytest.raises(Done):
        while_loop(lambda state: state[-1] < 9, grow, [X])


def test_a_condition_may_be_whatever_python_takes_for_one():
    items, total = while_loop(lambda state: state[0], lambda state: (state[0][1:], state[1] + 1), ([1, 2], X))
    assert items == [] and total == 3
