"""Autocast around transforms, and half precision in them: what is cast, to what, and what is kept of it."""

import contextlib
import copy

import pytest
import torch

from lanewise import grad, jacfwd, jacrev, jvp, vmap

XS = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
W = torch.randn(3, 4, generator=torch.Generator().manual_seed(4))


def _autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


torch.manual_seed(0)
LAYERS = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(3)])
RECURRENT = torch.nn.LSTM(3, 2)
ENCODER = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
BLOCK = torch.nn.Sequential(
    torch.nn.Conv1d(1, 2, 2), torch.nn.BatchNorm1d(2).eval(), torch.nn.Conv1d(2, 2, 2), torch.nn.LayerNorm(1)
)
CAST = {
    "as many ways as lanes": lambda x, k: LAYERS[int(k)](x),
    "as many ways, and before": lambda x, k: LAYERS[0](LAYERS[1](x) + LAYERS[int(k)](x)) if k > 0 else LAYERS[0](x),
    "gradients of as many ways": lambda x, k: grad(lambda x: LAYERS[int(k)](x).sum())(x),
    "branch": lambda x, k: LAYERS[0](x) if k > 0 else LAYERS[1](x * 2),
    "jacfwd": lambda x, k: jacfwd(lambda x: LAYERS[0](x).tanh())(x),
    "jacrev": lambda x, k: jacrev(lambda x: torch.nn.functional.gelu(LAYERS[0](x)))(x),
    "jvp of convolutions and norms": lambda x, k: jvp(lambda x: BLOCK(x[None, None]), (x,), (x,))[1],
    "lstm": lambda x, k: RECURRENT(x[None])[0],
    "einsum": lambda x, k: torch.einsum("a,ab->b", x, W),
    "pinv": lambda x, k: torch.linalg.pinv(torch.outer(x, x) + torch.eye(3)),
    "pinv, hermitian": lambda x, k: torch.linalg.pinv(torch.outer(x, x) + torch.eye(3), hermitian=True),
    "encoder layer": lambda x, k: ENCODER(torch.outer(x, W[0])[None]),
    "attention": lambda x, k: ENCODER.self_attn(*[torch.outer(x, W[0])[None]] * 3)[0],
    "jvp of an encoder layer": lambda x, k: jvp(ENCODER, (torch.outer(x, W[0])[None],), (torch.outer(x, W[1])[None],))[
        0
    ],
    "matrix_power": lambda x, k: torch.linalg.matrix_power(torch.outer(x, x), 3),
}


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("f", CAST.values(), ids=CAST)
def test_autocast_of_what_a_function_calls(f, mode):
    """Twice, as casts of parameters are kept from one time to the next."""
    xs, ks = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 2, 1, 2])
    with mode(), _autocast():
        try:
            want = torch.stack([f(x, k) for x, k in zip(xs, ks, strict=True)])
        except RuntimeError as error:
            if "primitive descriptor" not in str(error):
                raise
            pytest.skip("torch has no such kernel for this processor")
        for _ in range(2):
            got = vmap(f)(xs, ks)
            assert type(got) is torch.Tensor
            assert got.dtype == want.dtype
            torch.testing.assert_close(got.float(), want.float(), rtol=3e-2, atol=3e-2)
        assert type(torch.nn.functional.linear(xs, LAYERS[0].weight)) is torch.Tensor


@pytest.mark.parametrize("transform", [jacrev, jacfwd, lambda f: grad(lambda x: f(x).sum())])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_in_bfloat16(transform, approximate):
    """Its kernel of the backward pass does not broadcast on the CPU."""
    xs = XS.to(torch.bfloat16)
    f = transform(lambda x: torch.nn.functional.gelu(x, approximate=approximate))
    torch.testing.assert_close(vmap(f)(xs).double(), vmap(f)(xs.double()), rtol=2e-2, atol=2e-2)


NORMS = {
    "batch": torch.nn.BatchNorm1d(3),
    "batch, evaluated": torch.nn.BatchNorm1d(3).eval(),
    "layer": torch.nn.LayerNorm(3),
    "group": torch.nn.GroupNorm(1, 3),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_tangents_of_norms_have_the_precision_of_the_values(norm):
    """That of the parameters may be another."""
    x, t = XS.to(torch.bfloat16), XS.cos().to(torch.bfloat16)
    exact = jvp(copy.deepcopy(norm).double(), (x.double(),), (t.double(),))[1]
    for run in (
        lambda: jvp(norm, (x,), (t,)),
        lambda: [part[0] for part in vmap(lambda x, t: jvp(norm, (x,), (t,)))(x[None], t[None])],
    ):
        value, tangent = run()
        assert value.dtype == tangent.dtype == torch.bfloat16
        torch.testing.assert_close(tangent.double(), exact, rtol=5e-2, atol=5e-2)
