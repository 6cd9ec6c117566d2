"""Reading and writing at indices that differ from lane to lane, and sorting."""

import torch
from torch import Tensor

from benchmarks.layers import gradients, mapped
from benchmarks.models import random
from benchmarks.workload import Peers, workload

LANES = 64


def _places(*shape: int, below: int, seed: int = 3) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


@workload("indexing", 1.0)
def index_rows() -> Peers:
    """x[i]: 32 rows of [100, 16], other ones in each of 64 lanes"""
    args = (random(LANES, 100, 16), _places(LANES, 32, below=100))
    return mapped(lambda api, x, i: x[i], (0, 0), args, LANES)


@workload("indexing", 1.0)
def index_rows_of_one() -> Peers:
    """x[i] of one [100, 16] for 64 lanes of 32 rows"""
    return mapped(lambda api, x, i: x[i], (None, 0), (random(100, 16), _places(LANES, 32, below=100)), LANES)


@workload("indexing", 1.0)
def index_gradient() -> Peers:
    """gradient of x[i, j], 64 lanes of [100, 16]"""
    args = (random(LANES, 100, 16), _places(LANES, 32, below=100), _places(LANES, 32, below=16))
    return gradients(lambda api, x, i, j: x[i, j], (0, 0, 0), args, LANES)


@workload("indexing", 1.0)
def index_put_accumulate() -> Peers:
    """index_put with accumulate: 32 rows added to [100, 16], 64 lanes"""
    args = (random(LANES, 100, 16), _places(LANES, 32, below=100), random(LANES, 32, 16, seed=1))
    return mapped(lambda api, x, i, y: torch.index_put(x, (i,), y, accumulate=True), (0, 0, 0), args, LANES)


@workload("indexing", 1.0)
def gather() -> Peers:
    """gather of 32 elements in each of 16 rows of [16, 100], 64 lanes"""
    args = (random(LANES, 16, 100), _places(LANES, 16, 32, below=100))
    return mapped(lambda api, x, i: x.gather(1, i), (0, 0), args, LANES)


@workload("indexing", 1.0)
def gather_gradient() -> Peers:
    """gradient of gather of 32 elements in each of 16 rows of [16, 100], 64 lanes"""
    args = (random(LANES, 16, 100), _places(LANES, 16, 32, below=100))
    return gradients(lambda api, x, i: x.gather(1, i), (0, 0), args, LANES)


@workload("indexing", 1.0)
def scatter_add() -> Peers:
    """scatter_add of [32, 16] into [100, 16], 64 lanes"""
    args = (random(LANES, 100, 16), _places(LANES, 32, 16, below=100), random(LANES, 32, 16, seed=1))
    return mapped(lambda api, x, i, y: x.scatter_add(0, i, y), (0, 0, 0), args, LANES)


@workload("indexing", 1.0)
def index_select() -> Peers:
    """index_select of 32 rows of [100, 16], 64 lanes"""
    args = (random(LANES, 100, 16), _places(LANES, 32, below=100))
    return mapped(lambda api, x, i: x.index_select(0, i), (0, 0), args, LANES)


@workload("indexing", 1.0)
def index_add() -> Peers:
    """index_add of 32 rows to [100, 16], 64 lanes"""
    args = (random(LANES, 100, 16), _places(LANES, 32, below=100), random(LANES, 32, 16, seed=1))
    return mapped(lambda api, x, i, y: x.index_add(0, i, y), (0, 0, 0), args, LANES)


@workload("indexing", 1.0)
def sort() -> Peers:
    """sort of [16, 100] along its rows, 64 lanes"""
    return mapped(lambda api, x: tuple(x.sort(1)), (0,), (random(LANES, 16, 100),), LANES)


@workload("indexing", 1.0)
def topk() -> Peers:
    """topk of 5 in each row of [16, 100], 64 lanes"""
    return mapped(lambda api, x: tuple(x.topk(5)), (0,), (random(LANES, 16, 100),), LANES)


@workload("indexing", 1.0)
def sort_gradient() -> Peers:
    """gradient of a sorted [16, 100], 64 lanes"""
    return gradients(lambda api, x: x.sort(1)[0], (0,), (random(LANES, 16, 100),), LANES)
