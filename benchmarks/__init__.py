"""Lanewise measured against its peers; run `python -m benchmarks`."""
