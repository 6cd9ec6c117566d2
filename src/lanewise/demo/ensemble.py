"""Eight networks trained at once, and what they say together: a prediction and how sure they are."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm

from lanewise import grad, stack_module_state, vmap
from lanewise.demo.model import Params, logits_of


@dataclass(frozen=True)
class Prediction:
    """Mean class probabilities [N, 10] of an ensemble, and two uncertainties [N] in nats."""

    probabilities: Tensor
    entropy: Tensor
    disagreement: Tensor


def train_ensemble(
    nets: list[nn.Module],
    images: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    seed: int,
    batch: int = 100,
    rate: float = 0.1,
) -> Params:
    """Train all networks side by side, one lane each, on the same batches; return parameters [E, *S]."""
    logits = logits_of(nets[0])

    def loss(params: Params, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(vmap(logits, in_dims=(None, 0))(params, images), labels)

    step = vmap(grad(loss), in_dims=(0, None, None))
    params = {name: p.detach() for name, p in stack_module_state(nets)[0].items()}
    velocity = {name: torch.zeros_like(p) for name, p in params.items()}
    generator = torch.Generator().manual_seed(seed)
    for _ in tqdm(range(epochs), desc="ensemble of eight", unit="epoch", leave=False):
        for chosen in torch.randperm(len(images), generator=generator).split(batch):
            gradients = step(params, images[chosen], labels[chosen])
            velocity = {name: 0.9 * v + gradients[name] for name, v in velocity.items()}
            params = {name: p - rate * velocity[name] for name, p in params.items()}
    return params


def predict_ensemble(net: nn.Module, params: Params, images: Tensor) -> Prediction:
    """Predict images [N, 1, 8, 8] with all members, whose parameters are [E, *S].

    The entropy of the mean is the whole uncertainty. The disagreement is the entropy of the mean less the mean of the
    members' entropies: the mutual information between the prediction and the choice of the member.
    """
    with torch.no_grad():
        each = vmap(vmap(logits_of(net), in_dims=(None, 0)), in_dims=(0, None))(params, images).softmax(dim=-1)
    mean = each.mean(dim=0)
    whole = entropy(mean)
    return Prediction(mean, whole, whole - entropy(each).mean(dim=0))


def entropy(probabilities: Tensor) -> Tensor:
    """The entropy in nats over the last axis."""
    return torch.special.entr(probabilities).sum(dim=-1)
