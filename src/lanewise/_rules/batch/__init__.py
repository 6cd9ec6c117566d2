"""The batching rules. Importing this package registers them."""

from lanewise._rules.batch import (  # noqa: F401
    attention,
    conv,
    datadependent,
    embedding,
    factories,
    fft,
    indexing,
    inplace,
    linalg,
    losses,
    matmul,
    norm,
    pointwise,
    pooling,
    reductions,
    rnn,
    sampling,
    shapes,
    sorting,
    views,
)
