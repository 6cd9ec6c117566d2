"""The batching rules. Importing this package registers them."""

from lanewise._core.batch import BATCH_RULES
from lanewise._core.python.factories import see_operations_from_outside
from lanewise._core.python.out_arguments import write_by_twins
from lanewise._rules.batch import (  # noqa: F401
    attention,
    choosing,
    collectives,
    conv,
    datadependent,
    dropout,
    einsum,
    embedding,
    engine,
    factories,
    fft,
    indexing,
    inplace,
    layers,
    linalg,
    linear,
    losses,
    matmul,
    methods,
    norm,
    pointwise,
    pooling,
    quantized,
    random,
    reductions,
    rnn,
    sampling,
    shapes,
    sorting,
    sparse,
    views,
)

see_operations_from_outside(views=[op for op in BATCH_RULES if op.is_view])
write_by_twins()
