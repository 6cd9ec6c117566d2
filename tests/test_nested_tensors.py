"""Nested tensors as arguments and results of what differentiates, of both layouts."""

import pytest
import torch

from lanewise import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

F64 = torch.float64
TWO = torch.tensor(2.0, dtype=F64)
PARTS = [torch.tensor([1.0, 2.0, 3.0], dtype=F64), torch.tensor([4.0, 5.0], dtype=F64)]

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def nested(layout):
    return torch.nested.nested_tensor(PARTS, layout=layout)


def total(x):
    return torch.cat([part.reshape(-1) for part in x.unbind()]).sum()


def same(x, parts):
    return all(torch.equal(a, b) for a, b in zip(x.unbind(), parts, strict=True))


def message_of(run):
    """The text of an error, without the user's line."""
    with pytest.raises(RuntimeError) as caught:
        run()
    lines = str(caught.value).split("\n")
    assert lines[1].startswith(f"  at {__file__}:")
    return "\n".join([lines[0], *lines[2:]])


LAYOUTS = pytest.mark.parametrize("layout", [torch.jagged, torch.strided])


@LAYOUTS
def test_reverse_mode(layout):
    x = nested(layout)
    assert same(grad(lambda t: total(t * t))(x), [2 * part for part in PARTS])
    assert same(grad_and_value(lambda t: total(t * t))(x)[0], [2 * part for part in PARTS])
    y, pull = vjp(lambda t: t * t, x)
    assert same(y.detach(), [part**2 for part in PARTS])
    given = x if layout is torch.jagged else nested(layout)
    assert same(pull(given)[0], [2 * part**2 for part in PARTS])
    assert same(grad(lambda t: vmap(lambda u: (u**2).sum())(t).sum())(x), [2 * part for part in PARTS])


def test_twice():
    x = nested(torch.jagged)
    got = grad(lambda t: total(grad(lambda u: total(u * u * u))(t)))(x)
    assert same(got, [6 * part for part in PARTS])


@LAYOUTS
def test_a_cotangent_that_does_not_fit(layout):
    y, pull = vjp(lambda t: t * t, nested(layout))
    for wrong in (torch.ones(2, 3, dtype=F64), torch.nested.nested_tensor(PARTS[::-1], layout=layout)):
        with pytest.raises(RuntimeError, match="output a nested tensor of 2 components"):
            pull(wrong)


JACOBIAN = """{call}(x): x is a nested tensor of 2 components: a Jacobian has all dims of the result and of the \
argument, and theirs differ
Write instead:
  grad(f)(x)  # or vjp, which take nested tensors
  jacrev(lambda parts: f(torch.nested.as_nested_tensor(parts, layout=torch.jagged)))(list(x.unbind()))"""
RESULT = """{api}(f)(x): output is a nested tensor of 2 components: a Jacobian has all dims of the result and of the \
argument, and theirs differ
Write instead:
  return y.to_padded_tensor(0.0)"""
FORWARD = """{call}: primal 0 is a nested tensor of 2 components: forward mode goes through strided tensors only
Write instead:
  jvp(f_of_parts, (list(nested.unbind()),), (list(tangent.unbind()),))  # a list of tensors
  or grad and vjp, which take nested tensors"""


@LAYOUTS
def test_refused(layout):
    x = nested(layout)
    f = lambda x: total(x * x)
    for transform, call in ((jacrev, "jacrev(f)"), (jacfwd, "jacfwd(f)"), (hessian, "hessian(f)")):
        assert message_of(lambda t=transform: t(f)(x)) == JACOBIAN.format(call=call)
    assert message_of(lambda: jacrev(lambda x: x * nested(layout))(TWO)) == RESULT.format(api="jacrev")
    assert message_of(lambda: jvp(f, (x,), (x,))) == FORWARD.format(call="jvp(f, primals, tangents)")
    assert message_of(lambda: linearize(f, x)) == FORWARD.format(call="linearize(f, *primals)")


INSIDE = """jvp: a nested tensor and a value that has a tangent: forward mode goes through strided tensors only
Write instead:
  [part * scale for part in nested.unbind()]  # a list of tensors in place of it
  or grad, vjp and jacrev, which take nested tensors inside"""


def test_tangents_in_a_nested_tensor():
    """They were lost, and the derivatives zero."""
    x = nested(torch.jagged)
    ways = {
        "first": lambda s: (x * s).values(),
        "last": lambda s: (s * x).to_padded_tensor(0.0),
        "made": lambda s: torch.nested.nested_tensor_from_jagged(x.values() * s, x.offsets()).values(),
        "result": lambda s: x * s,
        "parts": lambda s: torch.cat((x * s).unbind()),
    }
    for f in ways.values():
        assert message_of(lambda f=f: jvp(f, (TWO,), (TWO,))) == INSIDE
        assert message_of(lambda f=f: linearize(f, TWO)) == INSIDE
        assert message_of(lambda f=f: jacfwd(f)(TWO)) == INSIDE
    x = nested(torch.strided)
    for f in (lambda s: x * s, lambda s: s * x, lambda s: torch.add(s, x)):
        assert message_of(lambda f=f: jvp(f, (TWO,), (TWO,))) == INSIDE


STACKED = """vmap: output: lanes return tensors that cannot be stacked: nested tensors, which have no strides
Write instead:
  vmap(f, out_dims="list")(xs)  # a list, one result for each lane"""


@LAYOUTS
def test_captured_with_lanes(layout):
    """Lane by lane; returned, an internal error of torch."""
    x = nested(layout)
    lanes = torch.tensor([2.0, 3.0], dtype=F64)
    for f in (lambda v: total(x * v), lambda v: total(v * x)) if layout is torch.strided else (lambda v: total(x) * v,):
        assert torch.equal(vmap(f)(lanes), torch.stack([f(v) for v in lanes]))
    if layout is torch.strided:
        assert message_of(lambda: vmap(lambda v: x * v)(lanes)) == STACKED
        got = vmap(lambda v: x * v, out_dims="list")(lanes)
        assert [same(one, [part * v for part in PARTS]) for one, v in zip(got, lanes, strict=True)] == [True, True]


def test_what_the_messages_say_to_write():
    x = nested(torch.jagged)
    f = lambda t: (t * t).sum()
    rows = jacrev(lambda parts: f(torch.nested.as_nested_tensor(parts, layout=torch.jagged)))(list(x.unbind()))
    assert all(torch.equal(row, 2 * part) for row, part in zip(rows, PARTS, strict=True))
    padded = torch.nn.utils.rnn.pad_sequence(PARTS, batch_first=True)
    assert torch.equal(jacrev(lambda s: (x * s).to_padded_tensor(0.0))(TWO), padded)
    pushed = jvp(lambda s: [part * s for part in x.unbind()], (TWO,), (TWO,))[1]
    assert all(torch.equal(row, 2 * part) for row, part in zip(pushed, PARTS, strict=True))
    pushed = jvp(lambda parts: sum((part**2).sum() for part in parts), (PARTS,), (PARTS,))[1]
    assert pushed == sum((2 * part**2).sum() for part in PARTS)


def test_memory_that_is_not_there_is_not_read():
    """The process ended."""
    x = nested(torch.strided)
    ones = torch.ones(2, dtype=F64)
    f = lambda v: torch.nested.to_padded_tensor(x * x, 0.0).sum() * v
    for run in (lambda: vmap(f)(ones), lambda: jvp(f, (ones,), (ones,))):
        with pytest.raises(
            RuntimeError, match="to_padded_tensor of a nested tensor of strided layout that was computed"
        ):
            run()
    assert vmap(lambda v: torch.nested.to_padded_tensor(x, 0.0).sum() * v)(ones).tolist() == [15.0, 15.0]
