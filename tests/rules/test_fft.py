"""Fourier transforms against the loop."""

import pytest
import torch

from lanewise import grad, vmap
from tests.oracles import assert_same
from tests.rules.lanes import check, normal

C = torch.complex128
CASES = {
    "fft": (torch.fft.fft, normal(5)),
    "fft complex": (lambda x: torch.fft.fft(x, dim=0, norm="ortho"), normal(4, 3, dtype=C)),
    "ifft": (lambda x: torch.fft.ifft(x, n=6), normal(2, 5, dtype=C)),
    "rfft": (torch.fft.rfft, normal(2, 5)),
    "irfft": (lambda x: torch.fft.irfft(x, n=5), normal(2, 3, dtype=C)),
    "hfft": (torch.fft.hfft, normal(2, 3, dtype=C)),
    "ihfft": (torch.fft.ihfft, normal(2, 4)),
    "fft2": (torch.fft.fft2, normal(2, 3, 4)),
    "fftn": (lambda x: torch.fft.fftn(x, dim=(0, -1)), normal(2, 3, 4, dtype=C)),
    "fftn no dims": (lambda x: torch.fft.fftn(x, dim=()), normal(2, 3, dtype=C)),
    "rfftn": (torch.fft.rfftn, normal(2, 3)),
    "irfftn": (lambda x: torch.fft.irfftn(x, s=(2, 4)), normal(2, 3, dtype=C)),
    "fftshift": (torch.fft.fftshift, normal(2, 3)),
    "stft": (
        lambda x: torch.view_as_real(torch.stft(x, 4, 2, window=torch.ones(4, dtype=x.dtype), return_complex=True)),
        normal(2, 12),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_as_in_the_loop(name):
    f, *makers = CASES[name]
    check(f, *makers)


def test_istft():
    x = torch.randn(4, 3, 5, 2, dtype=torch.float64)

    def f(x):
        return torch.istft(torch.view_as_complex(x), 4, 2, window=torch.ones(4, dtype=x.dtype))

    assert_same(vmap(f)(x), torch.stack([f(lane) for lane in x]))


WINDOWS = torch.rand(3, 8, dtype=torch.float64) + 0.1
SIGNALS = {
    "stft": torch.randn(3, 24, dtype=torch.float64),
    "istft": torch.randn(3, 5, 7, dtype=C),
    "istft of two": torch.randn(3, 2, 5, 7, dtype=C),
}


def _short_time(name):
    if name == "stft":
        return lambda x, w: torch.view_as_real(torch.stft(x, 8, 4, window=w, return_complex=True))
    return lambda x, w: torch.istft(x, 8, 4, window=w)


@pytest.mark.parametrize("dims", [(None, 0), (0, None), (0, 0)])
@pytest.mark.parametrize("name", SIGNALS)
def test_windows_of_each_lane(name, dims):
    f = _short_time(name)
    given = [t if dim == 0 else t[0] for t, dim in zip((SIGNALS[name], WINDOWS), dims, strict=True)]
    lanes = [[t[b] if dim == 0 else t for t, dim in zip(given, dims, strict=True)] for b in range(3)]
    want = torch.stack([f(*lane) for lane in lanes])
    assert_same(vmap(f, in_dims=dims)(*given), want)
    none = [t[:0] if dim == 0 else t for t, dim in zip(given, dims, strict=True)]
    assert_same(vmap(f, in_dims=dims)(*none), want[:0])

    # A window alone is differentiated, and the signal is what all lanes share.
    def size(w):
        return f(SIGNALS[name][0], w).square().sum()

    def slope(w):
        w = w.clone().requires_grad_()
        return torch.autograd.grad(size(w), w)[0]

    assert_same(vmap(grad(size))(WINDOWS), torch.stack([slope(w) for w in WINDOWS]))
    assert vmap(grad(size))(WINDOWS[:0]).shape == (0, 8)
