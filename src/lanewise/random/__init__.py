"""Random numbers from keys: each sampler is a function of a key, so lane `i` of `vmap` draws what iteration `i` draws.

There is no state. A key gives the same numbers each time; `split` and `fold_in` make new keys from old ones. The
numbers come from Philox4x32-10, and do not depend on chunks, nesting or the number of lanes.
"""

from lanewise.random.keys import bits, fold_in, key, split
from lanewise.random.samplers import (
    bernoulli,
    categorical,
    cauchy,
    exponential,
    gumbel,
    laplace,
    logistic,
    normal,
    permutation,
    randint,
    truncated_normal,
    uniform,
)

__all__ = [
    "bernoulli",
    "bits",
    "categorical",
    "cauchy",
    "exponential",
    "fold_in",
    "gumbel",
    "key",
    "laplace",
    "logistic",
    "normal",
    "permutation",
    "randint",
    "split",
    "truncated_normal",
    "uniform",
]
