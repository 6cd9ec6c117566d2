"""Gamma, Dirichlet, Poisson and binomial numbers for all lanes at once.

The methods draw until a number is accepted. Each round draws for all elements of all lanes, those of other chunks
included, so that what an element gets does not depend on the others.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel
from lanewise._core.functions.calls import highest_level
from lanewise._core.level import on_plane
from lanewise._core.plane import Plane
from lanewise._rules.batch.tracking import constant
from lanewise._torch_compat import OpOverload

aten = torch.ops.aten

_MOST_ROUNDS = 1000  # one in two is accepted in the worst case


class Rounds:
    """Two numbers for each element in each round, for `size` lanes from `start` on out of `total`, `count` in each.

    As often as there are seeds: one for each lane of the planes below.
    """

    def __init__(self, seeds: list[int], place: tuple[int, int, int], count: int, device: torch.device) -> None:
        self.seeds = seeds
        self.generators = {seed: torch.Generator(device).manual_seed(seed) for seed in seeds}
        self.start, self.size, self.total = place
        self.count = count
        self.device = device

    def draw(self) -> Tensor:
        """Between 0 and 1, 0 left out, float64 `[2, seeds * size * count]`"""
        by_seed = {seed: self._of(generator) for seed, generator in self.generators.items()}
        numbers = (
            torch.stack([by_seed[seed] for seed in self.seeds], 1) if len(self.seeds) != 1 else by_seed.popitem()[1]
        )
        return numbers.reshape(2, len(self.seeds) * self.size * self.count)

    def _of(self, generator: torch.Generator) -> Tensor:
        shape = (2, self.total, self.count)
        numbers = torch.rand(shape, generator=generator, dtype=torch.float64, device=self.device)
        return 1 - numbers.narrow(1, self.start, self.size)


Method = Callable[..., Tensor]


def drawn(method: Method, place: tuple[int, int, int], seed: Tensor, *parameters: Tensor) -> Tensor:
    """The numbers of a method, without history, on the highest plane of the seed and the parameters `[B, *S]`."""
    level = highest_level((seed, *parameters))
    if level is None:
        return _drawn_plainly(method, place, seed, *parameters)
    if not isinstance(level, BatchLevel):
        given = [x.value if isinstance(x, Plane) and x.level is level else x for x in (seed, *parameters)]
        return level.adopt(level.below(drawn, method, place, *given))
    given = [level.expanded(level.here(x)) for x in (seed, *parameters)]
    return level.wrap(level.below(drawn, method, place, *given))


def _drawn_plainly(method: Method, place: tuple[int, int, int], seeds: Tensor, *parameters: Tensor) -> Tensor:
    """seeds [*L], parameters [*L, B, *S] -> float64 [*L, B, *S]"""
    with on_plane(None), torch.no_grad():
        values = [constant(x) for x in parameters]
        rows = math.prod(values[0].shape[: seeds.dim() + 1])
        count = values[0].numel() // rows if rows else 0
        return method(Rounds(seeds.reshape(-1).tolist(), place, count, values[0].device), *values)


def repeat_until_done(
    rounds: Rounds, start: Tensor, attempt: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
) -> Tensor:
    """`start` [n], with the elements that are NaN replaced by what is accepted first.

    `attempt(which, first, second)` makes numbers for the elements `which`, and says whether each is accepted.
    """
    out, pending = start.double(), start.isnan().nonzero().squeeze(1)
    for _ in range(_MOST_ROUNDS):
        if not pending.numel():
            break
        numbers, accepted = attempt(pending, *rounds.draw()[:, pending])
        out[pending[accepted]] = numbers[accepted]
        pending = pending[~accepted]
    return out


def gamma(rounds: Rounds, shapes: Tensor) -> Tensor:
    """Gamma numbers of scale 1, by the method of Marsaglia and Tsang: shapes [B, *S] -> float64 [B, *S]"""
    a = shapes.double().reshape(-1)
    small = a < 1
    power, _ = rounds.draw()
    d = torch.where(small, a + 1, a) - 1 / 3
    c = 1 / (9 * d).sqrt()

    def attempt(which: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.erfinv(2 * first - 1) * math.sqrt(2)
        v = (1 + c[which] * x) ** 3
        fits = (v > 0) & (second.log() < 0.5 * x * x + d[which] * (1 - v + v.clamp_min(1e-300).log()))
        return d[which] * v, fits

    out = repeat_until_done(rounds, torch.where(a > 0, torch.nan, torch.where(a == 0, 0.0, torch.inf)), attempt)
    out = torch.where(small, out * power ** (1 / a), out)
    return torch.where(a >= 0, out, torch.nan).view(shapes.shape)


def dirichlet(rounds: Rounds, shapes: Tensor) -> Tensor:
    """shapes [B, *S, n] -> float64 [B, *S, n], which sum to 1 along the last dim"""
    parts = gamma(rounds, shapes).clamp_min(torch.finfo(torch.float64).tiny)
    return parts / parts.sum(-1, keepdim=True)


def poisson(rounds: Rounds, rates: Tensor) -> Tensor:
    """Counts by inversion for small rates, by Hoermann's transformed rejection for others: rates [B, *S] -> float64"""
    mu = rates.double().reshape(-1)
    known = torch.where(mu == 0, 0.0, torch.nan)
    small = (mu > 0) & (mu < 10)

    def ratio(k: Tensor, which: Tensor) -> Tensor:
        return mu[which] / k

    known = by_inversion(known, small, (-mu).exp(), ratio, rounds.draw()[0])
    b = 0.931 + 2.53 * mu.sqrt()
    a = -0.059 + 0.02483 * b
    inverse = 1.1239 + 1.1328 / (b - 3.4)
    squeeze = 0.9277 - 3.6224 / (b - 2)

    def attempt(which: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        m, wide, tail = mu[which], b[which], a[which]
        u = first - 0.5
        us = 0.5 - u.abs()
        k = ((2 * tail / us + wide) * u + m + 0.43).floor()
        bound = -m + k * m.log() - torch.lgamma(k.clamp_min(0) + 1)
        exact = (second * inverse[which] / (tail / (us * us) + wide)).log() <= bound
        quick = (us >= 0.07) & (second <= squeeze[which])
        return k, quick | ((k >= 0) & ~((us < 0.013) & (second > us)) & exact)

    known = torch.where(mu.isfinite(), known, torch.inf)
    out = repeat_until_done(rounds, known, attempt)
    return torch.where(mu >= 0, out, torch.nan).view(rates.shape)


def binomial(rounds: Rounds, counts: Tensor, odds: Tensor) -> Tensor:
    """Successes by inversion or by Hoermann's transformed rejection: counts, odds [B, *S] -> float64 [B, *S]"""
    n, given = (t.double().reshape(-1) for t in torch.broadcast_tensors(counts, odds))
    shape = torch.broadcast_shapes(counts.shape, odds.shape)
    turned = given > 0.5
    p = torch.where(turned, 1 - given, given)
    q = 1 - p
    small = (n > 0) & (p > 0) & (n * p < 10)
    known = torch.where((n <= 0) | (p <= 0), 0.0, torch.nan)

    def ratio(k: Tensor, which: Tensor) -> Tensor:
        return (n[which] - k + 1) / k * (p / q)[which]

    known = by_inversion(known, small, torch.exp(n * torch.log1p(-p)), ratio, rounds.draw()[0])
    spread = (n * p * q).sqrt()
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * p
    squeeze = 0.92 - 4.2 / b
    alpha = (2.83 + 5.1 / b) * spread
    mode = ((n + 1) * p).floor()
    peak = torch.lgamma(mode + 1) + torch.lgamma(n - mode + 1)

    def attempt(which: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        total, wide, tail = n[which], b[which], a[which]
        u = first - 0.5
        us = 0.5 - u.abs()
        k = ((2 * tail / us + wide) * u + total * p[which] + 0.5).floor()
        inside = (k >= 0) & (k <= total)
        at = k.clamp_min(0).minimum(total)
        bound = peak[which] - torch.lgamma(at + 1) - torch.lgamma(total - at + 1)
        bound = bound + (at - mode[which]) * (p / q)[which].log()
        exact = (second * alpha[which] / (tail / (us * us) + wide)).log() <= bound
        return k, inside & (((us >= 0.07) & (second <= squeeze[which])) | exact)

    known = torch.where((n >= 0) & (given >= 0) & (given <= 1), known, torch.inf)
    out = repeat_until_done(rounds, known, attempt)
    out = torch.where(out.isfinite(), torch.where(turned, n - out, out), torch.nan)
    return out.view(shape)


def by_inversion(
    known: Tensor, small: Tensor, first: Tensor, ratio: Callable[[Tensor, Tensor], Tensor], numbers: Tensor
) -> Tensor:
    """Counts for the elements that are `small`, from one number each: how many probabilities, from `first` on, fit in.

    `ratio(k, which)` is the probability of `k` over that of `k - 1`.
    """
    which = small.nonzero().squeeze(1)
    out = known.double()
    left, chance = numbers[which], first[which]
    k = torch.zeros_like(left)
    while which.numel():
        done = (left <= chance) | (k >= 1000)
        out[which[done]] = k[done]
        which, left, chance, k = which[~done], (left - chance)[~done], chance[~done], k[~done] + 1
        chance = chance * ratio(k, which)
    return out


METHODS: dict[OpOverload, Method] = {
    aten._sample_dirichlet.default: dirichlet,
    aten._standard_gamma.default: gamma,
    aten.binomial.default: binomial,
    aten.poisson.default: poisson,
}
