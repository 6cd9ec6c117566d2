"""`register_multi_grad_hook` in transforms: called as in a loop over plain autograd, with each lane's gradients."""

import pytest
import torch
from torch.autograd.graph import register_multi_grad_hook

from lanewise import debug, grad, jvp, linearize, vjp, vmap

XS = torch.tensor([1.0, 2.0, 3.0])
W = torch.tensor(2.0, requires_grad=True)


def hooked(mode, told, *, branch=False, late=False, unused=False):
    """A function of a lane and of `W`, a hook of which tells `told` of the gradients, as a text."""

    def f(x):
        y, z = x * 3 * W, x**2 * W
        tensors = (y, z, (x * W).exp()) if unused else (y, z)
        out = (y * z).sum() if late else None

        def hook(gradients):
            each = gradients if mode == "all" else [gradients]
            if branch and each[0] > 60:
                told("{} many", each[0])
            else:
                told(" ".join(["none" if g is None else "{:.1f}" for g in each]), *[g for g in each if g is not None])

        register_multi_grad_hook(tensors, hook, mode=mode)
        return (y * z).sum() if out is None else out

    return f


def slope(f):
    def run(x):
        x = x.clone().requires_grad_() * 1
        return torch.autograd.grad(f(x), x)[0]

    return run


WAYS = {
    "backward of vmap": lambda f: vmap(f)(XS).sum().backward(),
    "vmap(grad)": lambda f: vmap(grad(lambda x: f(x * 1)))(XS),
    "grad(vmap)": lambda f: grad(lambda xs: vmap(f)(xs * 1).sum())(XS),
    "grad(vmap) in chunks": lambda f: grad(lambda xs: vmap(f, chunk_size=2)(xs * 1).sum())(XS),
    "vjp(vmap)": lambda f: vjp(lambda xs: vmap(f)(xs * 1), XS)[1](torch.ones(3)),
    "vmap(vjp)": lambda f: vmap(lambda x: vjp(f, x * 1)[1](torch.ones(()))[0])(XS),
    "autograd inside": lambda f: vmap(slope(f))(XS),
    "backward inside": lambda f: vmap(lambda x: (f(x * 1).backward(), x)[1])(XS),
    "grad(vmap(vmap))": lambda f: grad(lambda xs: vmap(vmap(f))(xs[None] * 1).sum())(XS),
    "vmap(grad(vmap))": lambda f: vmap(grad(lambda xs: vmap(f)(xs * 1).sum()))(XS[None]),
    "backward of jvp(vmap)": lambda f: jvp(vmap(f), (XS,), (XS,))[0].sum().backward(),
    "backward of vmap(jvp)": lambda f: vmap(lambda x: jvp(f, (x,), (x,))[0])(XS).sum().backward(),
    "backward of linearize": lambda f: linearize(vmap(f), XS)[0].sum().backward(),
    "jvp(vmap(grad))": lambda f: jvp(vmap(grad(lambda x: f(x * 1))), (XS,), (XS,)),
    "jvp alone": lambda f: [jvp(f, (x,), (x,))[0].backward() for x in XS],
}
KINDS = {
    "all": {"mode": "all"},
    "any": {"mode": "any"},
    "all, one unused": {"mode": "all", "unused": True},
    "all, branches": {"mode": "all", "branch": True},
    "any, branches": {"mode": "any", "branch": True},
    "all, set late": {"mode": "all", "late": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_called_as_in_a_loop(way, kind, capsys):
    want = []
    for x in XS:
        f = hooked(told=lambda text, *numbers: want.append(text.format(*map(float, numbers))), **KINDS[kind])
        slope(f)(x)
    capsys.readouterr()
    WAYS[way](hooked(told=debug.print, **KINDS[kind]))
    got = [line.split(": ", 1)[-1] for line in capsys.readouterr().out.splitlines()]
    W.grad = None
    assert len(want) == 3
    assert sorted(got) == sorted(want)
