"""Functions of torch whose arguments are Python numbers that differ from lane to lane, against the loop."""

import collections
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lanewise import vmap
from tests.control.test_numbers import outcome

XS = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
KS = torch.tensor([1, 3, 2, 1, 2, 3])

CALLS = {
    "split": lambda x, k: torch.split(x, int(k))[0].sum(),
    "split2": lambda x, k: x.split(int(k))[-1].sum(),
    "pad": lambda x, k: F.pad(x, (int(k), 1)).cumsum(0)[4],
    "onehot": lambda x, k: F.one_hot(k, 5).float() * float(x[0]),
    "onehot2": lambda x, k: F.one_hot(k, int(k) + 2).sum() * x,
    "unfl": lambda x, k: x.repeat(int(k)).unflatten(0, (int(k), -1)).sum(0),
    "interp": lambda x, k: F.interpolate(x[None, None], scale_factor=float(k)).sum(),
    "drop": lambda x, k: F.dropout(x, float(k) * 0, training=False),
    "softmax": lambda x, k: F.softmax(x, dim=int(k) - int(k)),
    "norm": lambda x, k: x.norm(p=int(k)),
    "norm2": lambda x, k: torch.linalg.vector_norm(x, int(k)),
    "lins": lambda x, k: torch.linspace(0, float(x[0]), 3),
    "ar": lambda x, k: torch.arange(int(k), int(k) + 3),
    "ar2": lambda x, k: torch.arange(0, float(k), 0.5).sum(),
    "topk": lambda x, k: x.topk(int(k)).values.sum(),
    "chunk": lambda x, k: x.chunk(int(k))[0].sum(),
    "narrow": lambda x, k: x.narrow(0, int(k) - 1, 2),
    "select": lambda x, k: x.select(0, int(k)),
    "unbind": lambda x, k: x.unbind()[int(k)],
    "roll": lambda x, k: x.roll(int(k)),
    "rep": lambda x, k: x.repeat_interleave(int(k)).sum(),
    "diag": lambda x, k: torch.diag(x, int(k)).sum(),
    "triu": lambda x, k: torch.triu(x[:, None] * x, int(k)),
    "tril": lambda x, k: torch.ones(4, 4).tril(int(k)),
    "quant": lambda x, k: x.quantile(float(k) / 4),
    "kth": lambda x, k: x.kthvalue(int(k)).values,
    "gath": lambda x, k: x.gather(0, torch.tensor([int(k), 0])),
    "idxsel": lambda x, k: x.index_select(0, torch.tensor([int(k)])),
    "lin2": lambda x, k: F.leaky_relu(x, float(k) * 0.1),
    "elu": lambda x, k: F.elu(x, alpha=float(k)),
    "hard": lambda x, k: F.hardtanh(x, -float(k), float(k)),
    "thr": lambda x, k: F.threshold(x, float(k) * 0.1, 0.0),
    "celu": lambda x, k: torch.celu(x, float(k)),
    "addcm": lambda x, k: torch.addcmul(x, x, x, value=float(k)),
    "lerp": lambda x, k: torch.lerp(x, x * 2, float(k)),
    "mfill": lambda x, k: x.masked_fill(x > 0, float(k)),
    "fillm": lambda x, k: torch.full_like(x, float(k)),
    "newf": lambda x, k: x.new_full((2,), int(k)),
    "eye": lambda x, k: torch.eye(int(k)).sum(),
    "einsum": lambda x, k: torch.einsum("i,i->", x, x) * int(k),
    "cumsum": lambda x, k: x.cumsum(int(k) - int(k)),
    "permute": lambda x, k: x.view(2, 2).permute(int(k) % 2, 1 - int(k) % 2),
    "view": lambda x, k: x.view(2, int(k) * 2 // int(k)),
    "setit": lambda x, k: [(y := x.clone()), y.__setitem__(int(k), 9.0)][0],
    "setsl": lambda x, k: [(y := x.clone()), y.__setitem__(slice(0, int(k)), 9.0)][0],
    "tup": lambda x, k: x[None, int(k)],
    "pool layer": lambda x, k: torch.nn.MaxPool1d(int(k))(x[None, None]).sum(),
    "pool layer of planes": lambda x, k: torch.nn.MaxPool2d((1, int(k)))(x.view(1, 2, 2).repeat(1, 1, 2)).sum(),
    "adaptive layer": lambda x, k: torch.nn.AdaptiveAvgPool1d(output_size=int(k))(x[None, None]).sum(),
    "unfold layer": lambda x, k: torch.nn.Unfold((1, int(k)))(x[None, None, None]).sum(),
    "slope layer": lambda x, k: torch.nn.LeakyReLU(float(k) * 0.1)(x),
    "deque": lambda x, k: sum(collections.deque(x, maxlen=int(k))),
    "permutations": lambda x, k: sum(a[0] for a in itertools.permutations(x, int(k))),
    "seed of a generator": lambda x, k: x * torch.Generator().manual_seed(int(k)).initial_seed(),
    "ell": lambda x, k: x.view(2, 2)[..., int(k) % 2],
    "neg": lambda x, k: x[-int(k)],
    "step": lambda x, k: x[:: int(k)].sum(),
    "npsin": lambda x, k: x * float(np.sin(float(k))),
    "npmax": lambda x, k: x * float(np.maximum(int(k), 2)),
    "nparr": lambda x, k: torch.tensor(np.array([int(k), 2])),
    "pow_": lambda x, k: torch.pow(int(k), x),
    "fmod": lambda x, k: torch.fmod(x, int(k)),
    "rem": lambda x, k: x % int(k),
    "fld": lambda x, k: x // int(k),
    "bitw": lambda x, k: k & int(k) | 1,
    "cmp2": lambda x, k: torch.eq(x, float(x[1])).float(),
    "iso": lambda x, k: torch.isclose(x, x + float(k) * 0),
    "mul_": lambda x, k: x.clone().mul_(int(k)),
    "sub_": lambda x, k: [(y := x.clone()), y.sub_(float(k))][0],
    "copy": lambda x, k: torch.zeros(4).copy_(x * int(k)),
    "item2": lambda x, k: x[0].item() * x,
    "cat": lambda x, k: torch.cat([x, torch.tensor([float(k)])]),
    "stack": lambda x, k: torch.stack([x[0], torch.tensor(float(k))]),
    "hyp": lambda x, k: torch.hypot(x, torch.as_tensor(float(k))),
    "asten": lambda x, k: torch.as_tensor([int(k), 1]),
    "scalar": lambda x, k: torch.scalar_tensor(float(k)),
    "zl": lambda x, k: torch.zeros_like(x) + int(k),
    "where2": lambda x, k: torch.where(x > 0, x, float(k)),
    "where3": lambda x, k: torch.where(x > int(k) / 10, 1, 0),
    "sumd": lambda x, k: x.sum(int(k) - int(k)),
    "mean": lambda x, k: x.view(2, 2).mean(int(k) % 2),
    "flip": lambda x, k: x.view(2, 2).flip(int(k) % 2),
    "sq": lambda x, k: x.view(1, 4).squeeze(int(k) - int(k)),
    "unsq": lambda x, k: x.unsqueeze(int(k) % 1),
    "tr": lambda x, k: x.view(2, 2).transpose(0, int(k) % 2),
    "expand": lambda x, k: x.expand(int(k), 4).sum(),
    "std": lambda x, k: x.std(correction=int(k) - 1),
    "clampt": lambda x, k: x.clamp(-int(k), float(k)),
    "roundd": lambda x, k: x.round(decimals=int(k)),
    "amax": lambda x, k: x.view(2, 2).amax(int(k) % 2),
    "manual": lambda x, k: sum(x[i] * i for i in range(int(k))),
    "whilei": lambda x, k: [i for i in range(5) if i < k][-1] * x,
    "bmm": lambda x, k: torch.baddbmm(x.view(1, 2, 2), x.view(1, 2, 2), x.view(1, 2, 2), beta=int(k), alpha=float(k)),
}


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("name", CALLS)
def test_as_the_loop(name):
    f = CALLS[name]
    got, want = outcome(lambda: vmap(f)(XS, KS)), outcome(lambda: [f(x, k) for x, k in zip(XS, KS)])
    if isinstance(want, type):
        assert got is want
    else:
        torch.testing.assert_close(got, want)
