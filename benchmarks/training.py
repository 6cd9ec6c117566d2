"""The gradient of a mean loss, with the model mapped over examples by vmap and its weights captured from outside."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import block, cnn, labels, mlp, random
from benchmarks.workload import BATCHED, Peers, Target, transforms, workload

TARGET = Target(speed=0.95, peer=BATCHED, memory=1.3)


def _peers(net: nn.Module, x: Tensor) -> Peers:
    y, weights = labels(len(x)), list(net.parameters())

    def gradient(outputs: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.cross_entropy(outputs, y), weights)

    def make(api):
        one = api.vmap(lambda x: net(x.unsqueeze(0)).squeeze(0))
        return lambda: gradient(one(x))

    peers = transforms(make)
    peers[BATCHED] = lambda: gradient(net(x))
    return peers


@workload("training", TARGET)
def training_mlp() -> Peers:
    """training gradient through vmap, MLP 784-512-512-10, 256 examples"""
    return _peers(mlp(784, 512, 512, 10, activation=nn.ReLU), random(256, 784))


@workload("training", TARGET, tolerance=1e-3)
def training_cnn() -> Peers:
    """training gradient through vmap, CNN with GroupNorm, 64 images of 28 x 28"""
    return _peers(cnn(), random(64, 1, 28, 28))


@workload("training", TARGET)
def training_transformer() -> Peers:
    """training gradient through vmap, transformer block of width 64, 64 sequences of 32"""
    return _peers(block(), random(64, 32, 64))
