"""The forward rules. Importing this package registers them."""

from lanewise._rules.jvp import (  # noqa: F401
    arithmetic,
    backward,
    indexing,
    inplace,
    linalg,
    losses,
    matmul,
    network,
    numbers,
    pointwise,
    reductions,
    sampling,
    special,
    views,
)
