"""The networks that the workloads share, and their parameters."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Params = dict[str, Tensor]


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers from a seed of their own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(count: int, classes: int = 10) -> Tensor:
    """Classes [count] from a fixed seed."""
    return torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(7))


def mlp(*sizes: int, activation: Callable[[], nn.Module] = nn.Tanh, seed: int = 0) -> nn.Sequential:
    """Linear layers of these sizes with an activation between them."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for n, m in zip(sizes, sizes[1:]):
        layers += [nn.Linear(n, m), activation()]
    return nn.Sequential(*layers[:-1])


def cnn(seed: int = 0) -> nn.Sequential:
    """A small network for images [B, 1, 28, 28]: two convolutions with GroupNorm and pooling, one linear layer."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


class Block(nn.Module):
    """A transformer block with attention of four heads, and a linear readout of the mean: [B, 32, 64] -> [B, 10]."""

    def __init__(self, width: int = 64, heads: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.readout = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, classes]"""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.readout(x.mean(dim=1))


def block(seed: int = 0) -> Block:
    """A transformer block from a seed."""
    torch.manual_seed(seed)
    return Block()


def parameters_of(net: nn.Module) -> Params:
    """The parameters as tensors without a graph."""
    return {name: p.detach().clone() for name, p in net.named_parameters()}
