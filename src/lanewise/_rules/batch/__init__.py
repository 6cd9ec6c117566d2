"""The batching rules. Importing this package registers them."""

from lanewise._rules.batch import (  # noqa: F401
    factories,
    inplace,
    matmul,
    pointwise,
    reductions,
    views,
)
