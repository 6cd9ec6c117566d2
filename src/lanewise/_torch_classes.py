"""Private classes of torch: those of DTensors and nested tensors, and Functions."""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributions.dirichlet
import torch.nested._internal.nested_tensor
import torch.utils._device

# Collects, once, the functions to which `with torch.device(...)` gives its device: before a level leads names of torch
# elsewhere. Without it: where the first such context is inside, it and all later ones pass by `torch.empty`.
torch.utils._device._device_constructors()

# How Dirichlet and Beta draw: a Function with a backward and no jvp. Without it, they have no forward mode.
DirichletSample: Any = torch.distributions.dirichlet._Dirichlet

# The class of nested tensors of jagged layout, which each operation on one builds anew. Without it, tangents are lost.
NestedTensor = torch.nested._internal.nested_tensor.NestedTensor

# Around what a function of torch given DTensors calls. Without it, the call would come back for ever.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass


class DTensorNames:
    """What DTensors are made of: the class, its Functions (linear all of them), and how they are laid out on a mesh.

    DTensor is no plane, but a class of its own with a part of the tensor on each process. Without these names its
    methods are missing on wrappers, and an operation with a DTensor before the lanes raises.
    """

    def __init__(self, api: Any) -> None:
        self.DTensor: Any = api.DTensor
        self.Replicate: Any = api.Replicate
        self._spec: Any = api.DTensorSpec
        self._meta: Any = api.TensorMeta
        self._sharded: Any = (api.Shard, api._StridedShard)
        own = importlib.import_module("torch.distributed.tensor._redistribute")
        self.functions = frozenset(
            [api._ToTorchTensor, api._FromTorchTensor, api.Redistribute, getattr(own, "NestedRedistribute", None)]
        )

    def moved(self, spec: Any, by: int, shape: Any, strides: Any) -> Any:
        """The layout with `by` more dims in front."""
        placements = tuple([self._moved(placement, by) for placement in spec.placements])
        meta = self._meta(torch.Size(shape), tuple(strides), spec.tensor_meta.dtype)
        return self._spec(spec.mesh, placements, tensor_meta=meta)

    def _moved(self, placement: Any, by: int) -> Any:
        if type(placement) is self._sharded[0]:
            return type(placement)(placement.dim + by)
        if type(placement) is self._sharded[1]:
            return type(placement)(placement.dim + by, split_factor=placement.split_factor)
        return placement


_dtensor_names: DTensorNames | None = None


def dtensor_names() -> DTensorNames | None:
    """What DTensors are made of; None before anybody has imported them, and in a torch without them."""
    global _dtensor_names
    if _dtensor_names is None:
        api = sys.modules.get("torch.distributed.tensor._api")
        if hasattr(api, "distribute_module"):  # the last name it defines that has to do with the class
            _dtensor_names = DTensorNames(api)
    return _dtensor_names


# What `allow_mutation_on_saved_tensors` is made of: its hooks, its mode, and what stands for a saved tensor. Without
# them, it asks values on planes for their memory, and raises.
SwapWithCloned: Any = torch.autograd.graph._swap_with_cloned
CloneBeforeMutation: Any = torch.autograd.graph._CloneArgBeforeMutateMode
MutationHandle: Any = torch.autograd.graph._Handle


def mutation_context(pack: Any) -> Any:
    """What one `allow_mutation_on_saved_tensors` knows, by its hook."""
    return pack.__closure__[pack.__code__.co_freevars.index("ctx")].cell_contents


def awaited_nodes(hook: Any) -> list | None:
    """The nodes that a hook of `register_multi_grad_hook` waits for; None for another hook.

    Without it, such a hook is called by passes of its own plane only.
    """
    code = getattr(hook, "__code__", None)
    if code is None or "grad_fns" not in code.co_freevars or code.co_filename != torch.autograd.graph.__file__:
        return None
    return hook.__closure__[code.co_freevars.index("grad_fns")].cell_contents


def lead_edges(torchs_own: Callable[[Any], Any]) -> None:
    """Let edges of autograd's graph be of the nodes that `torchs_own` gives for those of `x.grad_fn`."""
    plain = torch.autograd.graph._get_grad_fn_or_grad_acc

    @functools.wraps(plain)
    def found(tensor: Any) -> Any:
        return torchs_own(plain(tensor))

    torch.autograd.graph._get_grad_fn_or_grad_acc = found
