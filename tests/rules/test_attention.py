"""Attention and the fused layers built on it, against the loop."""

import pytest
import torch
from torch.nn import functional as F

from lanewise import grad, jacfwd, jvp, vmap
from tests.oracles import assert_same
from tests.rules.lanes import bools, check, normal

attend = F.scaled_dot_product_attention
aten = torch.ops.aten


def mask_of(*shape):
    """True somewhere in each row."""
    return lambda g: bools(*shape)(g) | torch.eye(shape[-2], shape[-1], dtype=torch.bool)


CASES = {
    "3-dim": (attend, normal(2, 3, 4), normal(2, 5, 4), normal(2, 5, 4)),
    "4-dim": (attend, normal(2, 2, 3, 4), normal(2, 2, 5, 4), normal(2, 2, 5, 4)),
    "4-dim one image": (attend, normal(1, 2, 3, 4), normal(1, 2, 5, 4), normal(1, 2, 5, 4)),
    "causal": (lambda q: attend(q, q, q, is_causal=True), normal(1, 2, 4, 4)),
    "causal 3-dim": (lambda q: attend(q, q, q, is_causal=True, scale=0.3), normal(2, 4, 4)),
    "scale": (lambda q, k: attend(q, k, k, scale=0.7), normal(2, 1, 3, 4), normal(2, 1, 3, 4)),
    "mask": (lambda q, m: attend(q, q, q, m), normal(1, 2, 3, 4), mask_of(3, 3)),
    "mask 4-dim": (lambda q, m: attend(q, q, q, m), normal(2, 2, 3, 4), mask_of(2, 2, 3, 3)),
    "mask broadcast": (lambda q, m: attend(q, q, q, m), normal(2, 2, 3, 4), mask_of(1, 1, 3, 3)),
    "mask added": (lambda q, m: attend(q, q, q, m.detach()), normal(2, 2, 3, 4), normal(3, 3)),
    "math": (lambda q, k, v: aten._scaled_dot_product_attention_math(q, k, v)[0], *[normal(2, 3, 4)] * 3),
    "safe_softmax": (lambda x: torch._safe_softmax(x, -1), normal(2, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_as_in_the_loop(name):
    f, *makers = CASES[name]
    check(f, *makers)


def test_gradient_of_the_per_sample_gradient():
    def slope(q):
        with torch.enable_grad():
            q = q.view_as(q).requires_grad_()
            return torch.autograd.grad(attend(q, q, 2 * q, is_causal=True).pow(3).sum(), q, create_graph=True)[0]

    def slope_by_formula(q):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            q = q.view_as(q).requires_grad_()
            return torch.autograd.grad(attend(q, q, 2 * q, is_causal=True).pow(3).sum(), q, create_graph=True)[0]

    q = torch.randn(3, 1, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    got = torch.autograd.grad(vmap(slope)(q).square().sum(), q)
    want = torch.autograd.grad(sum(slope_by_formula(lane).square().sum() for lane in q), q)
    assert_same(got, want)


@pytest.mark.parametrize("shape", [(1, 4, 3, 4), (4, 3, 4)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("wrt", [0, 1, 2])
def test_heads_that_share_keys(shape, masked, wrt):
    """`enable_gqa` under every transform, against keys and values that are repeated by hand"""
    mask = torch.randn(3, 5, dtype=torch.float64) if masked else None

    def shared(q, k, v):
        return attend(q, k, v, mask, enable_gqa=True)

    def repeated(q, k, v):
        return attend(q, k.repeat_interleave(2, -3), v.repeat_interleave(2, -3), mask)

    keys = (*shape[:-3], 2, 5, 4)
    xs = [torch.randn(2, 2, *each, dtype=torch.float64) for each in (shape, keys, keys)]
    one, many = [x[0, 0] for x in xs], [x[0] for x in xs]

    def total(f):
        return lambda *args: (f(*args) ** 2).sum()

    for transformed in (
        lambda f: vmap(f)(*many),
        lambda f: vmap(grad(total(f), wrt))(*many),
        lambda f: vmap(vmap(grad(total(f), wrt)))(*xs),
        lambda f: grad(lambda *args: vmap(total(f))(*args).sum(), wrt)(*many),
        lambda f: jvp(f, tuple(one), tuple(many[j][1] for j in range(3))),
        lambda f: vmap(jacfwd(total(f), wrt))(*many),
        lambda f: jvp(grad(total(f), wrt), tuple(one), tuple(many[j][1] for j in range(3))),
        lambda f: grad(lambda *args: (vmap(grad(total(f), wrt))(*args) ** 2).sum(), wrt)(*many),
    ):
        assert_same(transformed(shared), transformed(repeated))


def test_choice_of_kernel():
    flash, math = (
        int(torch.nn.attention.SDPBackend.FLASH_ATTENTION.value),
        int(torch.nn.attention.SDPBackend.MATH.value),
    )
    choices = []

    def f(q):
        choices.append(torch._fused_sdp_choice(q[None], q[None], q[None]))
        choices.append(torch._fused_sdp_choice(q, q, q))
        choices.append(torch._fused_sdp_choice(q[None], q[None], q[None], dropout_p=0.5))
        return q

    vmap(f)(torch.randn(3, 2, 4, 8))
    assert choices == [flash, math, math]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_encoder_layer(norm_first, train):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=norm_first).double()
    layer.train(train)
    x = torch.randn(3, 2, 4, 8, dtype=torch.float64)
    with torch.set_grad_enabled(train):
        for shape in (x, x[:, 0]):
            assert_same(vmap(layer)(shape).detach(), torch.stack([layer(lane) for lane in shape]).detach())


@pytest.mark.parametrize("need_weights, average", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("masked", [None, "attn_mask", "key_padding_mask"])
def test_multi_head_attention(need_weights, average, masked):
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).double().eval()
    x = torch.randn(3, 2, 4, 8, dtype=torch.float64)
    masks = {}
    if masked:
        masks[masked] = torch.zeros((4, 4) if masked == "attn_mask" else (2, 4), dtype=torch.bool)
        masks[masked][..., -1] = True

    def f(x):
        out, weights = module(x, x, x, need_weights=need_weights, average_attn_weights=average, **masks)
        return (out, weights) if need_weights else out

    with torch.no_grad():
        rows = [f(lane) for lane in x]
        want = tuple(map(torch.stack, zip(*rows, strict=True))) if need_weights else torch.stack(rows)
        assert_same(vmap(f)(x), want)


@pytest.mark.parametrize("dims", [(), (2,), (3, 2), (2, 3, 2)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [None, "bool", "added"])
def test_attention_of_lanes_as_one_operation(dims, causal, masked):
    if causal and masked:
        pytest.skip("torch takes one of both")
    q, k, v = (torch.randn(4, *dims, 5, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    mask = None
    if masked:
        mask = torch.rand(5, 5, generator=torch.Generator().manual_seed(9)) > 0.3
        mask = mask | torch.eye(5, dtype=torch.bool) if masked == "bool" else mask.float()

    def f(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)

    want = torch.stack([f(*row) for row in zip(q, k, v)])
    torch.testing.assert_close(vmap(f)(q, k, v), want)
    torch.testing.assert_close(
        vmap(f, in_dims=(0, None, None))(q, k[0], v[0]), torch.stack([f(x, k[0], v[0]) for x in q])
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(vmap(f)(*leaves).sin().sum(), leaves)
    torch.testing.assert_close(
        grads, torch.autograd.grad(torch.stack([f(*row) for row in zip(*leaves)]).sin().sum(), leaves)
    )
    assert vmap(f)(q[:0], k[:0], v[:0]).shape == (0, *want.shape[1:])


def differences(f, x, direction):
    return (f(x + 1e-6 * direction) - f(x - 1e-6 * direction)) / 2e-6


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm", [None, torch.nn.LayerNorm(4).double()])
@pytest.mark.parametrize("frozen", [True, False])
def test_encoder_that_takes_the_padding_out(norm, frozen):
    """Without gradients, torch's encoder makes a nested tensor of what is no padding, which is zero at the end."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, norm).double().eval().requires_grad_(not frozen)
    x = torch.randn(4, 5, 4, dtype=torch.float64)
    padding = torch.arange(5) >= torch.tensor([[5], [2], [3], [1]])

    def each(x, padding):
        return encoder(x[None], src_key_padding_mask=padding[None])[0]

    def branch(x, padding):
        return each(x, padding) * 2 if x[0, 0] > 0 else each(-x, padding)

    def together(x):
        return encoder(x, src_key_padding_mask=padding)

    with torch.set_grad_enabled(frozen):
        for f in (each, branch):
            want = torch.stack([f(*lane) for lane in zip(x, padding)])
            assert_same(vmap(f)(x, padding), want)
            assert_same(vmap(vmap(f))(x[None], padding[None])[0], want)
        assert_same(vmap(each, in_dims=(None, 0))(x[0], padding), torch.stack([each(x[0], lane) for lane in padding]))
        assert_same(vmap(together)(torch.stack([x, -x])), torch.stack([together(x), together(-x)]))
        assert_same(vmap(lambda y: together(x) + y)(x), torch.stack([together(x) + lane for lane in x]))
        gaps = padding.clone()
        gaps[1, :1] = True  # what is no prefix stays: then the padding is not zero at the end
        assert_same(vmap(each)(x, gaps), torch.stack([each(*lane) for lane in zip(x, gaps)]))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_forward_mode_of_fused_layers(norm_first, masked):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=norm_first, activation="gelu")
    layer = layer.double().eval().requires_grad_(False)
    x, direction = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1) if masked else None

    def check_tangents(f):
        want = differences(f, x, direction)
        assert_same(jvp(f, (x,), (direction,))[1], want, (1e-6, 1e-6))
        got = vmap(lambda x, t: jvp(lambda x: f(x[None])[0], (x,), (t,))[1])(x, direction)
        assert_same(got, want, (1e-6, 1e-6))
        jacobians = vmap(jacfwd(lambda x: f(x[None])[0]))(x)
        assert_same(torch.einsum("bijkl,bkl->bij", jacobians, direction), want, (1e-6, 1e-6))

    check_tangents(lambda x: layer(x, mask))
    check_tangents(lambda x: layer.self_attn(x, x, x, attn_mask=mask, need_weights=False)[0])


def test_no_tangents_of_an_encoder_that_takes_the_padding_out():
    encoder = (
        torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2).double().eval()
    )
    x, padding = torch.randn(2, 3, 4, dtype=torch.float64), torch.tensor([[False, False, True], [False, False, False]])
    f = lambda x: encoder(x, src_key_padding_mask=padding)
    want = jvp(f, (x,), (x,))
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="enable_nested_tensor=False"):
            jvp(f, (x,), (x,))
        encoder.use_nested_tensor = False
        assert_same(jvp(f, (x,), (x,)), tuple(part.detach() for part in want))


@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 5, 4)])
def test_second_derivatives_with_a_mask_of_truth_values(shape):
    """Against differences of torch's first derivative."""
    query, key, value, along = (torch.randn(*shape, dtype=torch.float64) for _ in range(4))
    mask = torch.rand(5, 5) > 0.4
    mask.fill_diagonal_(True)

    def loss(q):
        return F.scaled_dot_product_attention(q, key, value, mask).sin().sum()

    def slope(q):
        q = q.clone().requires_grad_()
        return torch.autograd.grad(loss(q), q)[0]

    step = 1e-5
    expected = (slope(query + step * along) - slope(query - step * along)) / (2 * step)
    second = grad(lambda q: (grad(loss)(q) * along).sum())
    torch.testing.assert_close(second(query), expected, rtol=1e-6, atol=1e-8)
    mapped = vmap(second)
    for _ in range(3):
        torch.testing.assert_close(mapped(query.expand(2, *shape))[1], expected, rtol=1e-6, atol=1e-8)
