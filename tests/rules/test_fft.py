"""Fourier transforms against the loop."""

import pytest
import torch

from lanewise import vmap
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
