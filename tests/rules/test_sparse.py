"""Captured sparse tensors and lanes: products against the loop, everything else refused in words of the package."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from lanewise import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from lanewise.errors import TransformError
from tests.oracles import assert_same, loop_vmap

D = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore:.*(Sparse|sparse).*:UserWarning")

A = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]], dtype=D)
SQUARE = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, -2.0], [0.5, 0.0, 0.0]], dtype=D).to_sparse()
X = torch.randn(4, 3, dtype=D, generator=torch.Generator().manual_seed(0))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # in beta, says torch
    MATRICES = {
        "coo": A.to_sparse(),
        "coo, entries twice": torch.sparse_coo_tensor(
            [[0, 0, 1, 1], [1, 1, 0, 2]], torch.tensor([0.5, 1.5, 1.0, 3.0], dtype=D), (2, 3), check_invariants=True
        ),
        "csr": A.to_sparse_csr(),
        "csc": A.to_sparse_csc(),
    }
    NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
PRODUCTS = {
    "matrix @ vector": lambda s, x: s @ x,
    "matrix @ matrix": lambda s, x: s @ torch.stack([x, x.sin()], 1),
    "sparse.mm": lambda s, x: torch.sparse.mm(s, x[:, None]),
    "row @ matrix": lambda s, x: x[:2] @ s,
    "transposed": lambda s, x: s.t() @ x[:2],
    "scaled": lambda s, x: (s * 2) @ x,
    "negated": lambda s, x: (-s) @ x,
    "copied": lambda s, x: s.clone() @ x,
    "addmm": lambda s, x: torch.addmm(x[:2, None], s, x[:, None], beta=0.5, alpha=2),
    "addmm of two that have no lanes": lambda s, x: torch.addmm(x[:2, None], s, torch.ones(3, 1, dtype=D)),
    "sparse.addmm": lambda s, x: torch.sparse.addmm(x[:2, None], s, x[:, None]),
    "added to dense": lambda s, x: x[:2].outer(x) + s.to_dense(),
    "coalesced": lambda s, x: (s.coalesce() if s.layout is torch.sparse_coo else s) @ x,
    "summed": lambda s, x: torch.sparse.sum(s.to_sparse_coo().coalesce(), 0).to_dense() * x,
    "softmax": lambda s, x: torch.sparse.softmax(s.to_sparse_coo().coalesce(), 1) @ x,
    "by a sparse matrix": lambda s, x: (s.to_sparse_coo() @ SQUARE) @ x,
    "its values": lambda s, x: s.values().sum() * x,
}


def plain_grad(f):
    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x), x)[0]

    return gradient


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", MATRICES)
def test_products(name, product):
    matrix = MATRICES[name]
    if product == "its values" and not (matrix.layout is not torch.sparse_coo or matrix.is_coalesced()):
        matrix = matrix.coalesce()
    f = lambda x: PRODUCTS[product](matrix, x)
    loss = lambda x: f(x).pow(3).sum()
    assert_same(vmap(f)(X), loop_vmap(f)(X))
    assert_same(vmap(f, in_dims=1)(X.t()), loop_vmap(f)(X))
    assert_same(vmap(f)(X[:0]), loop_vmap(f)(X)[:0])
    assert_same(vmap(vmap(f))(torch.stack([X, 2 * X])), loop_vmap(loop_vmap(f))(torch.stack([X, 2 * X])))
    want = loop_vmap(plain_grad(loss))(X)
    assert_same(vmap(grad(loss))(X), want)
    assert_same(grad(lambda x: vmap(loss)(x).sum())(X), want)
    slope = (loop_vmap(f)(X + 1e-6) - loop_vmap(f)(X - 1e-6)) / 2e-6
    along = lambda x: jvp(f, (x,), (torch.ones(3, dtype=D),))[1]
    assert_same(loop_vmap(along)(X), slope, (1e-6, 1e-7))
    assert_same(vmap(along)(X), slope, (1e-6, 1e-7))
    assert_same(jvp(vmap(f), (X,), (torch.ones_like(X),))[1], slope, (1e-6, 1e-7))
    with torch.inference_mode():
        try:
            want = loop_vmap(f)(X)
        except RuntimeError:
            return  # torch transposes no sparse tensor there
        assert_same(vmap(f)(X), want)


JACOBIANS = {"jacrev": jacrev, "jacfwd": jacfwd, "hessian": lambda f: hessian(lambda x: f(x).pow(3).sum())}


@pytest.mark.parametrize("jacobian", JACOBIANS)
@pytest.mark.parametrize("product", ["matrix @ vector", "sparse.mm", "row @ matrix", "transposed"])
@pytest.mark.parametrize("name", MATRICES)
def test_jacobians_of_products(name, product, jacobian):
    """Directions are lanes of a level inside, where the operands may all be the same in the lanes around it."""
    matrix, jacobian = MATRICES[name], JACOBIANS[jacobian]
    f = lambda x: PRODUCTS[product](matrix, x)
    dense = lambda x: PRODUCTS[product](A, x) if product != "sparse.mm" else A @ x[:, None]
    want = loop_vmap(jacobian(dense))(X)
    assert_same(loop_vmap(jacobian(f))(X), want)
    assert_same(vmap(jacobian(f))(X), want)


ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(), 2).double().eval()
PADDED = torch.randn(4, 5, 4, dtype=D, generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([5, 3, 4, 3])


def _two_sentences(x, n):
    padding = torch.arange(5) >= torch.stack([n, n - 1])[:, None]
    return ENCODER(torch.stack([x, -x]), src_key_padding_mask=padding)


def _gaps(x, n):
    return ENCODER(x[None], src_key_padding_mask=(torch.arange(5) == n - 3)[None])[0]


def _written_and_branch(x, n):
    y = ENCODER(x[None], src_key_padding_mask=(torch.arange(5) >= n)[None])[0]
    y[0] = x[0]
    return y.mul_(2) if n > 3 else y


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("f", [_two_sentences, _gaps, _written_and_branch])
def test_encoders_that_nest_padded_sentences(f, mode):
    """Without gradients, torch's encoder makes a nested tensor of what is not padding; what is comes out as zeros."""
    with mode():
        want = loop_vmap(f)(PADDED, LENGTHS)
        assert_same(vmap(f)(PADDED, LENGTHS), want)
        assert_same(vmap(f, chunk_size=3)(PADDED, LENGTHS), want)
        got = vmap(vmap(f))(PADDED.view(2, 2, 5, 4), LENGTHS.view(2, 2))
        assert_same(got.flatten(0, 1), want)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_ensemble_of_encoders_on_padded_sentences():
    models = [copy.deepcopy(ENCODER) for _ in range(3)]
    for seed, model in enumerate(models):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            nn.init.normal_(parameter, 0.0, 0.3)
    padding = torch.arange(5) >= LENGTHS[:, None]
    run = lambda *state: functional_call(ENCODER, state, (PADDED,), {"src_key_padding_mask": padding})
    with torch.no_grad():
        want = torch.stack([model(PADDED, src_key_padding_mask=padding) for model in models])
        assert_same(vmap(run)(*stack_module_state(models)), want)


def test_coo_added_to_dense():
    f = lambda x: torch.add(x[:2].outer(x), MATRICES["coo"], alpha=2)
    assert_same(vmap(f)(X), loop_vmap(f)(X))


def test_gradients_of_a_sparse_argument():
    matrix = MATRICES["coo"]
    got = grad(lambda s: torch.sparse.mm(s, torch.ones(3, 2, dtype=D)).sum())(matrix)
    assert got.layout is torch.sparse_coo and torch.equal(got.to_dense(), (A != 0) * 2.0)
    assert torch.equal(vjp(lambda s: s.to_dense(), matrix)[0], A)


def raised(run):
    with pytest.raises(TransformError) as caught:
        run()
    return str(caught.value).split("\n")


COO, CSR = MATRICES["coo"], MATRICES["csr"]
REFUSED = {
    "elementwise": (
        lambda: vmap(lambda x: COO * x)(X),
        "vmap: aten.mul.Tensor: a captured tensor of layout sparse_coo [2, 3] and a value that differs from lane to "
        "lane: the result would have lanes, and no strides to put them into; products with matrices and vectors take "
        "it",
        "sparse.to_dense()",
    ),
    "made of lanes": (
        lambda: vmap(lambda x: torch.sparse_coo_tensor([[0, 1, 2]], x, (3,), check_invariants=False))(X),
        "vmap: aten._sparse_coo_tensor_with_dims_and_tensors.default makes a tensor of layout sparse_coo in each lane, "
        "which has no strides to put lanes into",
        "torch.zeros(shape).index_put_(indices, values)  # a strided tensor",
    ),
    "converted": (
        lambda: vmap(lambda x: x.to_sparse())(X),
        "vmap: aten._to_sparse.default: sparse tensors cannot have lanes",
        "torch.where(mask, x, 0)           # dense inside the mapped function, .to_sparse() outside",
    ),
    "returned": (
        lambda: vmap(lambda x: COO)(X),
        "vmap: `f` returns a tensor of layout sparse_coo as output, which cannot be stacked: it has no strides to put "
        "lanes into. It is the same in all lanes",
        "vmap(f, out_dims=None)  # once, as it is",
    ),
    "a nested tensor returned": (
        lambda: vmap(lambda x: NESTED)(X),
        "vmap: `f` returns a tensor of layout nested as output, which cannot be stacked: it has no strides to put "
        "lanes into. It is the same in all lanes",
        "vmap(f, out_dims=None)  # once, as it is",
    ),
    "a nested tensor of lanes": (
        lambda: vmap(lambda x: torch.nested.nested_tensor([x, x[:1]]))(X),
        "vmap: nested tensors cannot have lanes",
        "torch.nn.utils.rnn.pad_sequence(parts)  # and a mask of what is there",
    ),
    "forward mode": (
        lambda: jvp(lambda s: s, (COO,), (COO,)),
        "jvp(f, primals, tangents): primal 0 has the layout sparse_coo: forward mode goes through strided tensors only",
        "jvp(lambda values: f(torch.sparse_coo_tensor(indices, values)), (values,), (tangent,))",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    run, text, instead = REFUSED[name]
    first, line, write, code, *_ = raised(run)
    assert first == text
    assert line.startswith(f"  at {__file__}:")
    assert (write, code) == ("Write instead:", f"  {instead}")


def test_code_that_uses_the_other_engine_inside():
    """flex_attention maps its score function with torch.func's own vmap."""
    x = torch.randn(3, 2, 16, 16)
    first, line, write, code, *_ = raised(lambda: vmap(lambda x: flex_attention(x[None], x[None], x[None]))(x))
    assert first.endswith(
        "flex_attention and its block masks use torch.func's own vmap, here on tensors of this transform. The two "
        "engines cannot be nested in this order"
    )
    assert line.startswith(f"  at {__file__}:") and "flex_attention(x[None]" in line
    assert code == "  F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # in place of flex_attention"


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning", "ignore::torch.jit.TracerWarning"
)
def test_tracing_by_torch_jit():
    """The trace would hold the results as constants."""
    for f in (lambda x: vmap(torch.sin)(x) + x, lambda x: jvp(torch.sin, (x,), (x,))[1] + x):
        first, _, _, code = raised(lambda f=f: torch.jit.trace(f, (X,)))
        assert first == (
            "torch.jit.trace cannot look into a transform: its results for the inputs at hand would become constants"
        )
        assert code == "  torch.export.export(module, args)  # or torch.compile(f)"


def test_one_hot():
    indices = torch.tensor([[0, 2], [1, 1]])
    f = lambda i: F.one_hot(i, 3)
    assert_same(vmap(f)(indices), F.one_hot(indices, 3))
    assert_same(vmap(vmap(f))(indices), F.one_hot(indices, 3))
    assert_same(vmap(F.one_hot)(torch.tensor([[0, 2], [2, 1]])), F.one_hot(torch.tensor([[0, 2], [2, 1]])))
    captured = vmap(lambda x: x * F.one_hot(indices, 3).sum())(torch.ones(2))
    assert_same(captured, torch.full((2,), 4.0))
    for bad, text in ((indices, "smaller than num_classes"), (indices - 2, "non-negative")):
        with pytest.raises(RuntimeError, match=text):
            vmap(lambda i: F.one_hot(i, 2))(bad)
    with pytest.raises(TransformError, match="num_classes=0"):
        vmap(lambda i: F.one_hot(i, 0))(indices)
    with pytest.raises(TransformError, match="LongTensor"):
        vmap(lambda i: F.one_hot(i, 3))(indices.int())


def test_parts_of_a_sparse_tensor_are_lanes():
    dense = torch.tensor([[[0.0, 2.0], [1.0, 0.0]], [[3.0, 0.0], [0.0, 4.0]], [[0.0, 0.0], [0.0, 0.0]]])
    x, xs = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.arange(12.0).reshape(3, 2, 2).requires_grad_()
    assert torch.equal(vmap(torch.sparse.mm, in_dims=(0, None))(dense.to_sparse(), x), dense @ x)
    assert torch.equal(vmap(torch.sparse.mm, in_dims=(2, 0))(dense.movedim(0, 2).to_sparse(), xs), dense @ xs)
    out = vmap(lambda a, x: torch.sparse.mm(a, x).square().sum())(dense.to_sparse(), xs)
    got, want = (torch.autograd.grad(o.sum(), xs)[0] for o in (out, (dense @ xs).square()))
    assert torch.equal(got, want)
    assert torch.equal(vmap(torch.sum)(dense.to_sparse()), dense.sum((1, 2)))
    assert vmap(torch.sparse.mm, in_dims=(0, None))(dense[:0].to_sparse(), x).shape == (0, 2, 2)


def test_results_of_a_sparse_layout():
    parts = torch.eye(2).to_sparse()
    with pytest.raises(RuntimeError, match="cannot be stacked: their layout, torch.sparse_coo, has no strides"):
        vmap(lambda s: s)(parts)
    rows = vmap(lambda s: s, out_dims="list")(parts)
    assert torch.equal(torch.stack([row.to_dense() for row in rows]), torch.eye(2))
