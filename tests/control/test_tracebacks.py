"""Errors of lanes: whose, and where; the library's own frames are left out between the user's."""

import sys
import traceback
import warnings

import pytest
import torch

import lanewise
from lanewise import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, value_and_grad, vjp, vmap


def too_large(y):
    if y > 2:
        raise ValueError("too large")
    return y * 2


def counted(x):
    while x < 1:
        x = x + 0.5
    return too_large(x)


def frames(error):
    return [(frame.name, frame.line) for frame in traceback.extract_tb(error.__traceback__)]


def test_frames_of_the_user():
    with pytest.raises(ValueError, match="too large") as caught:
        vmap(counted)(torch.tensor([0.1, 0.5, 3.0]))
    assert frames(caught.value)[-2:] == [
        ("counted", "return too_large(x)"),
        ("too_large", 'raise ValueError("too large")'),
    ]
    assert caught.value.lanes == [2]


def refuses(x):
    return torch.ones(3) @ torch.stack([x, x])


def branches(x):
    y = x * 2
    if y > 2:
        return refuses(y)
    return y


def yields(x):
    return sum(refuses(y) for y in [x, x * 2])


ONE, SOME = torch.tensor(3.0), torch.tensor([0.1, 3.0])
WAYS = {
    "vmap": lambda f: vmap(f)(SOME),
    "vmap in chunks": lambda f: vmap(f, chunk_size=1)(SOME),
    "vmap(vmap)": lambda f: vmap(vmap(f))(SOME[None]),
    "grad": lambda f: grad(f)(ONE),
    "grad_and_value": lambda f: grad_and_value(f)(ONE),
    "value_and_grad": lambda f: value_and_grad(f)(ONE),
    "vmap(grad)": lambda f: vmap(grad(f))(SOME),
    "vjp": lambda f: vjp(f, ONE),
    "jvp": lambda f: jvp(f, (ONE,), (ONE,)),
    "linearize": lambda f: linearize(f, ONE),
    "jacrev": lambda f: jacrev(f)(ONE),
    "jacfwd": lambda f: jacfwd(f)(ONE),
    "vmap(jacfwd)": lambda f: vmap(jacfwd(f))(SOME),
    "hessian": lambda f: hessian(f)(ONE),
    "functionalize": lambda f: lanewise.functionalize(f)(ONE),
    "cond": lambda f: lanewise.cond(ONE > 1, f, lambda x: x, (ONE,)),
    "switch": lambda f: lanewise.switch(torch.tensor(0), [f], ONE),
    "while_loop": lambda f: lanewise.while_loop(lambda x: x < 9, f, ONE),
    "fori_loop": lambda f: lanewise.fori_loop(0, 2, lambda i, x: f(x), ONE),
    "scan": lambda f: lanewise.scan(lambda c, x: (f(x), x), ONE, SOME + 2),
    "map": lambda f: lanewise.map(f, SOME),
    "associative_scan": lambda f: lanewise.associative_scan(lambda x, y: f(x[0] + 3), SOME),
}


@pytest.mark.parametrize("f", [refuses, branches, yields])
@pytest.mark.parametrize("way", WAYS)
def test_only_frames_of_the_user(way, f):
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            WAYS[way](f)
        own = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
        # Before Python 3.11, `raise` puts the function that has it into the traceback.
        allowed = 0 if sys.version_info >= (3, 11) else way.count("(") + 1
        assert len([name for name in own if name != __file__]) <= allowed
        assert frames(caught.value)[-1] == ("refuses", "return torch.ones(3) @ torch.stack([x, x])")
        assert caught.value.__context__ is None


@pytest.mark.parametrize("wrong", [lambda: vmap(refuses, in_dims=4)(SOME), lambda: grad(torch.sin)(SOME)])
def test_wrong_calls_show_the_call_alone(wrong):
    with pytest.raises((ValueError, RuntimeError)) as caught:
        wrong()
    assert len(frames(caught.value)) <= (2 if sys.version_info >= (3, 11) else 3)


@pytest.mark.parametrize(("size", "lanes"), [(1, [1]), (2, [1]), (3, [1])])
def test_lanes_of_chunks(size, lanes):
    with pytest.raises(ValueError, match="too large") as caught:
        vmap(lambda x: too_large(x) * 1, chunk_size=size)(torch.tensor([1.0, 3.0, 1.0, 1.0]))
    assert caught.value.lanes == lanes


def test_lanes_of_a_chunk_that_all_raise():
    def refuse(x):
        raise ValueError("never")

    with pytest.raises(ValueError, match="never") as caught:
        vmap(refuse, chunk_size=2)(torch.arange(4))
    assert caught.value.lanes == [0, 1]


def test_all_frames(monkeypatch):
    monkeypatch.setenv("LANEWISE_FULL_TRACEBACKS", "1")
    with pytest.raises(ValueError, match="too large") as caught:
        vmap(counted)(torch.tensor([0.1, 0.5, 3.0]))
    assert "boundary" in [name for name, _ in frames(caught.value)]


def test_a_mistake_of_the_library_keeps_its_frames(monkeypatch):
    monkeypatch.setattr("lanewise._control.runs.split.leave", int)
    with pytest.raises(TypeError) as caught:
        vmap(lambda x: x if x.item() > 1 else -x)(torch.tensor([0.1, 3.0]))
    assert frames(caught.value)[-1][0] == "run_apart"


def deprecated(x):
    warnings.warn("deprecated", DeprecationWarning, stacklevel=2)
    return x * 2


def passed_on(x):
    return deprecated_further_up(x)


def deprecated_further_up(x):
    warnings.warn("deprecated", DeprecationWarning, stacklevel=3)
    return x * 2


class Old:
    def __call__(self, x):
        warnings.warn("deprecated", DeprecationWarning, stacklevel=2)
        return x

    def method(self, x, *, by=1):
        warnings.warn("deprecated", DeprecationWarning, stacklevel=2)
        return x * by


OLD = Old()


def assigned(x):
    y = x * 1
    if x > 0:
        y = deprecated(y) + 1
    z = deprecated(x)
    w = OLD(x)
    return y + z + w


def in_expressions(x):
    y = deprecated(x) if x > 0 else OLD.method(x, by=2)
    y += deprecated(x)
    y = max(deprecated(y), x)
    if deprecated(x) > 1 and OLD(x) < 20:
        y = y * 2
    return passed_on(y) + [deprecated(v) for v in (x, y)][0]


def at_a_return(x):
    if x > 0:
        return deprecated(x)
    return OLD.method(x)


def of_several_kinds(x):
    best = None
    for v in (x, x * 2):
        if v > 1:
            best = deprecated(v)
        best = OLD(best)
    return x if best is None else OLD(best)


def as_a_key(x):
    values = [x, x * 2 if x > 0 else x]
    return sorted(values, key=deprecated)[0] + sum(map(deprecated, values))


@pytest.mark.usefixtures("parting")
@pytest.mark.parametrize(
    "f", [assigned, in_expressions, at_a_return, of_several_kinds, as_a_key], ids=lambda f: f.__name__
)
def test_warnings_name_the_line_that_a_loop_names(f):
    xs = torch.tensor([1.0, -4.0, 9.0, -2.0])

    def places(run):
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            run()
        return {(warning.filename, warning.lineno) for warning in given}

    torch.use_deterministic_algorithms(True)  # no loop over the examples
    try:
        want = places(lambda: [f(x) for x in xs])
        assert places(lambda: vmap(f)(xs)) == want
        assert places(lambda: vmap(f)(xs)) == want
        assert places(lambda: vmap(vmap(f))(xs.unflatten(0, (2, 2)))) == want
    finally:
        torch.use_deterministic_algorithms(False)
