"""A small convolutional network, and its loss as a function of the parameters and one example."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanewise import functional_call, replace_all_batch_norm_modules_, vmap

Params = dict[str, Tensor]


def group_norm_net(seed: int) -> nn.Module:
    """A network of 10,154 parameters for images [B, 1, 8, 8] that normalises each example by itself."""
    return _net(lambda channels: nn.GroupNorm(4, channels), seed)


def batch_norm_net(seed: int) -> nn.Module:
    """The same network with BatchNorm, freed of the running statistics that would tie the examples together."""
    return replace_all_batch_norm_modules_(_net(nn.BatchNorm2d, seed))


def _net(norm: Callable[[int], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    # SiLU and average pooling have no kinks, so finite differences can check every derivative.
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        norm(16),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        norm(32),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def parameters_of(net: nn.Module) -> Params:
    """The parameters as plain tensors that no autograd graph refers to."""
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def with_parameters(net: nn.Module, params: Params) -> nn.Module:
    """A copy of the network that owns these parameters, for use without any transform."""
    own = copy.deepcopy(net)
    own.load_state_dict(params, assign=True)
    return own.requires_grad_()


def logits_of(net: nn.Module) -> Callable[[Params, Tensor], Tensor]:
    """The function (parameters, image [1, 8, 8]) -> logits [10]."""

    def logits(params: Params, image: Tensor) -> Tensor:
        return functional_call(net, params, (image.unsqueeze(0),)).squeeze(0)

    return logits


def loss_of(net: nn.Module) -> Callable[[Params, Tensor, Tensor], Tensor]:
    """The function (parameters, image [1, 8, 8], label []) -> cross entropy []."""
    logits = logits_of(net)

    def loss(params: Params, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(logits(params, image), label)

    return loss


def predict(net: nn.Module, params: Params, images: Tensor) -> Tensor:
    """The most likely class [N] of each image [N, 1, 8, 8], each seen alone as in training."""
    with torch.no_grad():
        return vmap(logits_of(net), in_dims=(None, 0))(params, images).argmax(dim=1)


def accuracy(predicted: Tensor, labels: Tensor) -> float:
    """The fraction of predictions [N] that equal the labels [N]."""
    return (predicted == labels).double().mean().item()
