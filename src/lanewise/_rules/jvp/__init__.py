"""The forward rules. Importing this package registers them."""

from lanewise._rules.jvp import inplace, pointwise, reductions, views  # noqa: F401
