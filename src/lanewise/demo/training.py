"""Stochastic gradient descent in which no single example can pull harder than a bound."""

import math

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from lanewise import grad, vmap
from lanewise.demo.model import Params, loss_of, parameters_of


def norms(gradients: Params) -> Tensor:
    """The length [B] of each example's gradient over all parameters; the gradients are [B, *S]."""
    return torch.stack([g.flatten(1).square().sum(dim=1) for g in gradients.values()]).sum(dim=0).sqrt()


def clipped_mean(gradients: Params, bound: float) -> Params:
    """Cut each example's gradient to length `bound` and average over examples: [B, *S] -> [*S]."""
    # An infinite bound over a zero norm is infinite too, so the clamp turns both cases into "leave as it is".
    scale = (bound / norms(gradients)).clamp(max=1.0)
    return {name: torch.tensordot(scale, g, dims=1) / len(scale) for name, g in gradients.items()}


def train(
    net: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    bound: float = 1.0,
    seed: int = 0,
    batch: int = 100,
    rate: float = 0.5,
    momentum: float = 0.9,
    title: str = "",
) -> Params:
    """Train from the network's present parameters and return new ones; the network is left as it is."""
    generator = torch.Generator().manual_seed(seed)
    per_sample_gradients = vmap(grad(loss_of(net)), in_dims=(None, 0, 0))
    params = parameters_of(net)
    velocity = {name: torch.zeros_like(p) for name, p in params.items()}
    steps = epochs * math.ceil(len(images) / batch)
    with tqdm(total=steps, desc=title, unit="step", leave=False) as bar:
        for _ in range(epochs):
            for chosen in torch.randperm(len(images), generator=generator).split(batch):
                mean = clipped_mean(per_sample_gradients(params, images[chosen], labels[chosen]), bound)
                velocity = {name: momentum * v + mean[name] for name, v in velocity.items()}
                params = {name: p - rate * velocity[name] for name, p in params.items()}
                bar.update()
    return params
