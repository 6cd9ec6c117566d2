"""One call against the same work done in other ways: the results are compared, then the times.

This is the one module of the package that calls torch.func, as the peer it is measured against.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanewise import grad, vmap
from lanewise.demo.model import Params, loss_of, with_parameters

Gradients = Callable[[Params, Tensor, Tensor], Params]


def lanewise_gradients(net: nn.Module) -> Gradients:
    """Per-sample gradients in one call of Lanewise."""
    return vmap(grad(loss_of(net)), in_dims=(None, 0, 0))


def torch_func_gradients(net: nn.Module) -> Gradients:
    """Per-sample gradients in one call of torch.func."""

    def loss(params: Params, image: Tensor, label: Tensor) -> Tensor:
        logits = torch.func.functional_call(net, params, (image.unsqueeze(0),)).squeeze(0)
        return F.cross_entropy(logits, label)

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))


def loop_gradients(net: nn.Module) -> Gradients:
    """Per-sample gradients by a Python loop over the examples and plain torch.autograd."""

    def gradients(params: Params, images: Tensor, labels: Tensor) -> Params:
        own = with_parameters(net, params)
        leaves = list(own.parameters())
        rows = [
            torch.autograd.grad(F.cross_entropy(own(image.unsqueeze(0)).squeeze(0), label), leaves)
            for image, label in zip(images, labels)
        ]
        return {name: torch.stack(column) for name, column in zip(params, zip(*rows))}

    return gradients


@dataclass(frozen=True)
class Timing:
    """Seconds of CPU time per call (the median), and the largest difference from the first peer's results."""

    seconds: float
    difference: float


def compare(net: nn.Module, params: Params, images: Tensor, labels: Tensor, rounds: int) -> dict[str, Timing]:
    """Run Lanewise, torch.func and the loop in turn; the loop, which is slow, in the first round only."""
    peers = {
        "Lanewise, one call": lanewise_gradients(net),
        "torch.func, one call": torch_func_gradients(net),
        "Python loop": loop_gradients(net),
    }
    results = {name: peer(params, images[:2], labels[:2]) for name, peer in peers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for turn in range(rounds):
        for name, peer in peers.items():
            if turn and name == "Python loop":
                continue
            start = time.thread_time()
            results[name] = peer(params, images, labels)
            seconds[name].append(time.thread_time() - start)
    first = next(iter(results.values()))
    return {
        name: Timing(statistics.median(seconds[name]), largest_difference(first, result))
        for name, result in results.items()
    }


def largest_difference(left: Params, right: Params) -> float:
    """The largest absolute difference between two sets of tensors of the same names and shapes."""
    return max((left[name] - right[name]).abs().max().item() for name in left)
