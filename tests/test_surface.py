"""What a wrapper answers when Python asks it something: numbers, arrays, memory, text, copies."""

import copy
import io
import pickle
import re

import numpy
import pytest
import torch
from torch import nn

from lanewise import grad, jacfwd, jvp, linearize, vjp, vmap
from lanewise.errors import CapturedWriteError, EscapedTensorError, LaneValueError
from tests.oracles import assert_same, loop_vmap

XS = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
MEMORY = "Cannot access data pointer of Tensor that doesn't have storage"
STORAGE = "Cannot access storage"


def inside(ask, kind="lanes"):
    """The answer to a question asked of a wrapper inside a transform."""
    answers = []

    def f(x):
        answers.append(ask(x if kind != "uniform" else torch.arange(3.0, dtype=torch.float64)))
        return x

    if kind == "dual":
        jvp(f, (XS[0],), (XS[1],))
    elif kind == "recorded":
        vmap(grad(lambda x: f(x).sum()))(XS)
    else:
        vmap(f)(XS)
    return answers[0]


LANE_QUESTIONS = {
    "data_ptr": (lambda x: x.data_ptr(), MEMORY),
    "dlpack": (lambda x: x.__dlpack__(), MEMORY),
    "to_dlpack": (lambda x: torch.utils.dlpack.to_dlpack(x), MEMORY),
    "from_dlpack": (torch.from_dlpack, MEMORY),
    "storage": (lambda x: x.storage(), STORAGE),
    "untyped storage": (lambda x: x.untyped_storage(), STORAGE),
    "share_memory_": (lambda x: x.share_memory_(), STORAGE),
    "pickle": (pickle.dumps, STORAGE),
    "save": (lambda x: torch.save(x, io.BytesIO()), STORAGE),
}


@pytest.mark.parametrize("question", LANE_QUESTIONS)
def test_lane_values_have_no_single_answer(question):
    ask, phrase = LANE_QUESTIONS[question]
    with pytest.raises(RuntimeError, match=re.escape(phrase)) as caught:
        inside(ask)
    assert __file__ in str(caught.value)
    assert "Write instead:" in str(caught.value)


PYTHON_VALUES = {
    "item": lambda x: x * x.sum().item(),
    "int": lambda x: x * int(3 * x.sum()),
    "float": lambda x: x * float(x.sum()),
    "complex": lambda x: x * complex(x.sum()),
    "range": lambda x: x * len(range(x.argmax())),
    "list index": lambda x: x * [1, 2, 3][x.argmax()],
    "slice": lambda x: x * x[: x.argmax()].sum(),
    "number of full": lambda x: x * torch.full((2,), x[0].item()).sum(),
    "tolist": lambda x: x * sum(x.tolist()[1:]),
    "if": lambda x: x if x.sum() > 0 else -x,
    "and": lambda x: x * (x[0] > 0 and x[1] > 0),
    "not": lambda x: x * (not x[0] > 0),
    "is_nonzero": lambda x: x * torch.is_nonzero(x[0] > 0),
    "numpy": lambda x: x * torch.from_numpy(x.detach().numpy()),
    "numpy by force": lambda x: x * torch.from_numpy(x.numpy(force=True)),
    "asarray": lambda x: x * float(numpy.asarray(x.detach()).sum()),
    "numpy function": lambda x: x * torch.from_numpy(numpy.sin(x.detach().numpy())),
    "format": lambda x: x * float(f"{x.sum():.1f}"),
    "text": lambda x: x * (1 + sum(map(ord, str(x.detach()))) % 7),
}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("question", PYTHON_VALUES)
def test_each_lane_has_its_python_value(question):
    f = PYTHON_VALUES[question]
    assert_same(vmap(f)(XS), torch.stack([f(x) for x in XS]))
    xs = XS.clone().requires_grad_()
    got, want = (
        torch.autograd.grad(y.abs().sum(), xs) for y in (vmap(f)(xs), torch.stack([f(x) for x in xs.unbind()]))
    )
    assert_same(got, want)


def test_message_in_full():
    with pytest.raises(LaneValueError) as caught:
        vmap(lambda x: x.data_ptr())(XS)
    text = re.sub(r"level \d+", "level 1", str(caught.value)).split("\n  at ")
    assert text[0] == (
        "vmap: data_ptr(): Cannot access data pointer of Tensor that doesn't have storage: its value [3] differs from "
        "lane to lane (vmap level 1 with 4 lanes)"
    )
    assert "vmap(lambda x: x.data_ptr())(XS)" in text[1]
    assert text[1].endswith("Write instead:\n  return the tensor, and ask for its memory outside the mapped function")


def test_message_where_lanes_cannot_part():
    def f(x):
        y = x.sin()
        y.register_hook(lambda g: g * float(g.detach().numpy().sum()))
        return y * y

    def rows(x):
        x = x.requires_grad_()
        return torch.autograd.grad(f(x), x, torch.eye(3), is_grads_batched=True)[0]

    with pytest.raises(LaneValueError) as caught:
        vmap(rows)(XS.clone())
    assert str(caught.value).endswith(
        "Write instead:\n  torch.sin(x)  # torch's functions in place of NumPy's\n"
        "  or return the tensor, and call .numpy() outside the mapped function"
    )


UNIFORM_ANSWERS = {
    "item": (lambda x: x.sum().item(), 3.0),
    "int": (lambda x: int(x.sum()), 3),
    "float": (lambda x: float(x.sum()), 3.0),
    "bool": (lambda x: bool(x.sum() > 0), True),
    "range": (lambda x: list(range(x.argmax())), [0, 1]),
    "list index": (lambda x: [1, 2, 3][x.argmax()], 3),
    "slice": (lambda x: tuple(x[: x.argmax()].shape), (2,)),
    "tolist": (lambda x: x.tolist(), [0.0, 1.0, 2.0]),
    "numpy": (lambda x: x.numpy().tolist(), [0.0, 1.0, 2.0]),
    "asarray": (lambda x: numpy.asarray(x).tolist(), [0.0, 1.0, 2.0]),
    "from_dlpack": (lambda x: torch.from_dlpack(x).tolist(), [0.0, 1.0, 2.0]),
    "format": (lambda x: f"{x.sum():.2f}", "3.00"),
    "in": (lambda x: 2.0 in x, True),
    "pickle": (lambda x: pickle.loads(pickle.dumps(x)).tolist(), [0.0, 1.0, 2.0]),
    "tensor of tensors": (lambda x: torch.tensor([x[1], x[2]]).tolist(), [1.0, 2.0]),
    "equal": (lambda x: torch.equal(x, x), True),
}


@pytest.mark.parametrize("question", UNIFORM_ANSWERS)
def test_a_value_that_is_the_same_in_all_lanes_answers(question):
    ask, want = UNIFORM_ANSWERS[question]
    assert inside(ask, "uniform") == want


def test_lanes_that_agree_answer():
    """As a loop over the lanes would take the same way in each."""
    xs = torch.ones(4, 3)
    out = vmap(lambda x: x * 2 if x.sum() > 0 else x)(xs)
    assert_same(out, xs * 2)
    assert_same(vmap(lambda x: x * x[0].item())(xs), xs)
    assert_same(vmap(lambda x: x * 2 if x.sum() > 0 else x)(torch.ones(0, 3)), torch.ones(0, 3))


@pytest.mark.parametrize("question", [q for q in UNIFORM_ANSWERS if q not in ("numpy", "asarray")])
def test_the_primal_answers(question):
    """Control flow in forward mode is ordinary."""
    ask, want = UNIFORM_ANSWERS[question]
    got = []

    def f(x):
        got.append(ask(x))
        return x

    jvp(f, (torch.arange(3.0, dtype=torch.float64),), (torch.ones(3, dtype=torch.float64),))
    assert got == [want]


def test_numpy_of_what_is_differentiated():
    for kind in ("dual", "recorded"):
        with pytest.raises(RuntimeError, match=re.escape("Can't call numpy() on Tensor that requires grad.")):
            inside(lambda x: x.numpy(), kind)
    assert inside(lambda x: x.detach().numpy().tolist(), "dual") == XS[0].tolist()
    assert inside(lambda x: x.numpy(force=True).tolist(), "dual") == XS[0].tolist()


def test_text(capsys):
    def shown(ask, kind="lanes"):
        inside(lambda x: print(ask(x)), kind)
        return capsys.readouterr().out.rstrip()

    def described(x):
        print(repr(x))

    inside(described)
    text = capsys.readouterr().out.rstrip()
    assert re.fullmatch(r"BatchTensor\(level=\d+, lanes=4, value=tensor\(.*\)\)", text, re.DOTALL)
    assert "0.7" in text or "1." in text
    assert shown(lambda x: x).split(",", 1)[1] == text.split(",", 1)[1]
    assert re.fullmatch(
        r"BatchTensor\(level=\d+, the same in all 4 lanes, value=tensor\(\[0\., 1\., 2\.\], dtype=torch.float64\)\)",
        shown(lambda x: x, "uniform"),
    )
    dual = shown(lambda x: x[:1] * 0 + 1, "dual")
    assert re.fullmatch(r"DualTensor\(level=\d+, primal=tensor\(\[1\.\].*\), tangent=tensor\(\[-?0\.\].*\)\)", dual)
    assert "tangent=0" in shown(lambda x: torch.zeros(1), "dual")
    assert "requires_grad=True" in shown(lambda x: x.detach().requires_grad_())
    assert "grad_fn=<SinBackward0>" in shown(lambda x: x.sin(), "recorded")
    inside(lambda x: print(f"{x.sum() * 0 + 1.25:.1f}"))
    assert capsys.readouterr().out.rstrip() == "[1.2, 1.2, 1.2, 1.2]"
    inside(lambda x: print(f"{x}"))
    assert capsys.readouterr().out.startswith("BatchTensor(")
    vmap(vmap(lambda x: print(x) or x))(XS.reshape(2, 2, 3))
    nested = capsys.readouterr().out
    assert re.match(r"BatchTensor\(level=\d+, lanes=2, value=BatchTensor\(level=\d+, lanes=2, value=tensor", nested)


def test_text_changes_nothing():
    def f(x):
        total = torch.zeros(3, dtype=torch.float64)
        assert repr(total)
        assert repr(x)
        total[0] = x[0]
        assert repr(total)
        return total.sin()

    xs = XS.clone().requires_grad_()
    out = vmap(f)(xs)
    (g,) = torch.autograd.grad(out.sum(), xs)
    assert_same(g[:, 0], XS[:, 0].cos())


def test_printing_a_captured_tensor(capsys):
    captured = torch.arange(3.0)
    vmap(lambda x: print(captured, captured.detach(), captured.requires_grad) or x)(XS)
    out = capsys.readouterr().out
    assert out.startswith("tensor([0., 1., 2.]) BatchTensor(level=")
    assert captured.numpy().tolist() == [0.0, 1.0, 2.0]
    assert vmap(lambda x: x + float(captured.numpy()[1]))(XS).equal(XS + 1)


def test_copies():
    def f(x):
        total = torch.zeros(3, dtype=torch.float64)
        deep, shallow = copy.deepcopy(total), copy.copy(total)
        deep.add_(x)
        shallow.mul_(1.0)
        layer = copy.deepcopy(nn.ParameterDict({"w": nn.Parameter(x)}))
        assert isinstance(layer["w"], nn.Parameter)
        leaf = copy.deepcopy(x.detach().requires_grad_())
        assert leaf.requires_grad
        assert leaf.is_leaf
        memo: dict = {}
        assert copy.deepcopy([leaf, leaf], memo)[0] is memo[id(leaf)]
        return deep + copy.copy(x) + layer["w"].detach() + leaf.detach() + total

    assert_same(vmap(f)(XS), 4 * XS)
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        vmap(grad(lambda x: copy.deepcopy(x.sin()).sum()))(XS)
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        vmap(copy.deepcopy)(XS.clone().requires_grad_())


def test_deepcopy_of_a_captured_module():
    """A loop would train a copy for each lane; so do we."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 1).double()

    def f(x):
        mine = copy.deepcopy(layer)
        mine(x).sin().sum().backward()
        return mine.weight.grad[0]

    assert_same(vmap(f)(XS), torch.stack([f(x) for x in XS]))
    assert layer.weight.grad is None


def test_deepcopy_of_captured_tensors():
    """Buffers of a module, leaves with a gradient, containers with one tensor twice: each lane writes to copies."""
    buffer, leaf = torch.arange(3.0).double(), torch.ones(3).double().requires_grad_()
    leaf.grad = torch.full((3,), 2.0).double()
    norm = nn.BatchNorm1d(3).double().requires_grad_(False)

    def trained_norm(x):
        mine = copy.deepcopy(norm)
        mine(torch.stack([x, 2 * x]))
        return mine.running_mean, mine.running_var, mine.num_batches_tracked

    def written(x):
        both = copy.deepcopy({"a": buffer, "b": [buffer]})
        assert both["a"] is both["b"][0]
        both["a"].mul_(x)
        return both["b"][0]

    def gradient(x):
        mine = copy.deepcopy(leaf)
        assert mine.requires_grad
        assert mine.is_leaf
        (mine * x).sum().backward()
        return mine.grad

    def in_a_branch(x):
        mine = copy.deepcopy(buffer)
        if x.sum() > 0:
            mine += x
        else:
            mine = copy.deepcopy(mine) * x[0]
        return mine

    for f in (trained_norm, written, gradient, in_a_branch):
        want = loop_vmap(f)(XS)
        assert_same(vmap(f)(XS), want)
        assert_same(vmap(f, chunk_size=2)(XS), want)
        got = vmap(vmap(f))(XS[None])
        assert_same(tuple(part[0] for part in got) if isinstance(got, tuple) else got[0], want)
    assert_same(jvp(written, (XS[0],), (XS[1],))[1], buffer * XS[1])
    assert buffer.tolist() == [0, 1, 2]
    assert norm.num_batches_tracked == 0


def test_ordinary_questions():
    assert inside(len) == 3
    assert inside(lambda x: len(list(x))) == 3
    assert inside(lambda x: hash(x) == id(x))
    assert inside(lambda x: {x: 1}[x]) == 1
    assert inside(lambda x: x.is_contiguous())
    assert inside(lambda x: x.type()) == "torch.DoubleTensor"
    assert inside(lambda x: isinstance(x, torch.Tensor) and torch.is_tensor(x) and torch.is_floating_point(x))
    assert inside(lambda x: (x.element_size(), x.nbytes, x.ndim, tuple(x.size()), x.stride())) == (8, 24, 1, (3,), (1,))
    assert inside(lambda x: x.new_tensor([1.0, 2.0]).tolist()) == [1.0, 2.0]
    assert not inside(lambda x: x.is_shared())
    assert not inside(lambda x: x.is_pinned(), "dual")
    assert inside(lambda x: torch.equal(x, x), "dual")


def test_tensor_of_a_tensor():
    def f(x):
        with pytest.warns(UserWarning, match="To copy construct from a tensor"):
            y = torch.tensor(x)
        return y + torch.as_tensor(x) + torch.asarray(x)

    assert_same(vmap(f)(XS), 3 * XS)


@pytest.mark.parametrize("kind", ["lanes", "dual"])
def test_escaped(kind):
    kept = []
    inside(kept.append, kind)
    level = {"dual": r"jvp level \d+"}.get(kind, r"vmap level \d+ with 4 lanes")
    for ask in (
        lambda x: x + 1,
        lambda x: x.item(),
        bool,
        float,
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        numpy.asarray,
        pickle.dumps,
        lambda x: x.detach() + 1,
        lambda x: x.sum().backward(),
        lambda x: torch.utils.dlpack.to_dlpack(x),
        copy.deepcopy,
    ):
        with pytest.raises(EscapedTensorError, match=f"may have escaped from inside .*(?s:.*){level}, which has ended"):
            ask(kept[0])
    assert "ended=True" in repr(kept[0])
    assert tuple(kept[0].shape) == (3,)


def test_plain_tensors_stay_what_they_are():
    # A method put in the place of one of torch's may make a tensor a sequence to Python, with which torch.tensor fails.
    x = torch.tensor(2.0)
    assert torch.equal(torch.tensor([[x, -x], [x, x]]), torch.tensor([[2.0, -2.0], [2.0, 2.0]]))


# --- the data of plain tensors ---------------------------------------------------------------------------------------


def test_data_of_a_plain_tensor_takes_no_lanes():
    """It would have the memory of a wrapper, which is none, and a kernel crashed."""
    target, parameter = torch.zeros(3, dtype=torch.float64), nn.Parameter(torch.zeros(3, dtype=torch.float64))
    for plain in (target, parameter):

        def f(x, plain=plain):
            plain.data = x
            return plain + 1

        for call in (
            lambda f=f: vmap(f)(XS),
            lambda f=f: jvp(f, (XS[0],), (XS[0],)),
            lambda f=f: vmap(vmap(f))(XS[None]),
        ):
            with pytest.raises(CapturedWriteError, match="would become the data of a tensor .3. made outside"):
                call()
        assert torch.equal(plain.data, torch.zeros(3, dtype=torch.float64))
    with pytest.raises(CapturedWriteError):
        vmap(lambda x: torch.ops.aten.set_data(target, x))(XS)


def test_data_of_a_plain_tensor_takes_what_is_the_same_in_all_lanes():
    for call in (
        lambda f: vmap(f)(XS),
        lambda f: jvp(f, (XS[0],), (XS[0],))[0],
        lambda f: grad(lambda x: f(x).sum())(XS[0]),
    ):
        module = nn.Linear(3, 2)
        weight = module.weight.detach().clone()

        def f(x, module=module):
            module.double()  # sets the data of its parameters
            module.weight.data = torch.ones(2, 3, dtype=torch.float64) * module.weight.data
            return module(x)

        call(f)
        assert module.weight.dtype is torch.float64 and type(module.weight.data) is torch.Tensor
        torch.testing.assert_close(module.weight.detach(), weight.double())
        module(XS[0])


def test_data_outside_is_as_it_was():
    plain, other = torch.zeros(3), torch.ones(3)
    plain.data = other
    assert plain.data_ptr() == other.data_ptr() and torch.Tensor.data.__doc__ is not None
    with pytest.raises(TypeError):
        plain.data = 3
    with pytest.raises(RuntimeError):
        del plain.data


def whether_leaves(x):
    return torch.tensor([x.is_leaf, (x * 2).is_leaf, x.detach().is_leaf, (x.detach() * 2).is_leaf])


def no_longer_recorded(x):
    try:
        (x * 2).requires_grad_(False)
    except RuntimeError:
        return x * 2
    return x


def into_another(x):
    try:
        torch.mul(x, x, out=torch.empty(3, dtype=x.dtype))
    except RuntimeError:
        return x * 2
    return x


def into_truth_values(x):
    return torch.gt(x, 0, out=torch.empty(3, dtype=torch.bool)) * x


@pytest.mark.parametrize("f", [whether_leaves, no_longer_recorded, into_another, into_truth_values])
@pytest.mark.parametrize("tracked", [False, True])
def test_what_is_recorded_outside_is_no_leaf(f, tracked):
    rows = XS.clone().requires_grad_(tracked)
    assert_same(vmap(f)(rows), torch.stack([f(rows[lane]) for lane in range(4)]))
    with torch.no_grad():
        assert_same(vmap(f)(rows), torch.stack([f(rows[lane]) for lane in range(4)]))


LEAF = XS.clone().requires_grad_()
# Zeros that torch.autograd computes, without memory.
(ZEROS,) = torch.autograd.grad(torch.sgn(LEAF).sum(), LEAF)


@pytest.mark.parametrize(
    "call",
    [
        lambda zeros: vmap(torch.exp)(zeros),
        lambda zeros: vmap(torch.exp, chunk_size=2)(zeros),
        lambda zeros: vmap(vmap(torch.exp))(zeros),
        lambda zeros: vmap(lambda tree: tree[0].exp())([zeros]),
        lambda zeros: vmap(lambda tree: tree["x"] * 2)({"x": zeros}),
        lambda zeros: vmap(lambda x: x.exp() if x.sum() >= 0 else x)(zeros),
        lambda zeros: vmap(grad(lambda x: x.exp().sum()))(zeros),
        lambda zeros: vmap(lambda x: (x * zeros[0]).exp())(XS),
        lambda zeros: jvp(torch.exp, (zeros,), (XS,))[1],
        lambda zeros: jvp(torch.exp, (XS,), (zeros,))[1],
        lambda zeros: linearize(torch.exp, zeros)[1](XS),
        lambda zeros: linearize(torch.exp, XS)[1](zeros),
        lambda zeros: jacfwd(torch.exp)(zeros[0]),
        lambda zeros: vjp(torch.exp, zeros)[1](XS)[0],
        lambda zeros: vjp(torch.exp, XS)[1](zeros)[0],
    ],
)
def test_zeros_that_have_no_memory(call):
    assert ZEROS._is_zerotensor()
    for _ in range(3):
        assert_same(call(ZEROS).clone(), call(torch.zeros_like(XS)))
