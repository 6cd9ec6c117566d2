"""What a benchmark is: a function that returns the same work done by several peers, and what it has to reach."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import torch

import lanewise
from benchmarks.measure import Call

OWN, TORCH_FUNC, COMPILED, LOOP, BATCHED, JAX = "lanewise", "torch.func", "torch.compile", "loop", "batched", "jax.jit"
Peers = dict[str, Call]


@dataclass(frozen=True)
class Target:
    """The least ratio of the peer's time to Lanewise's, and the largest of Lanewise's peak memory to the peer's.

    `batched` is the least ratio of the time of the work written by hand for a batch, where that is a target besides.
    """

    speed: float
    peer: str = TORCH_FUNC
    memory: float | None = None
    batched: float | None = None


@dataclass(frozen=True)
class Workload:
    """A named piece of work; `build` returns a call for each peer, all with equal results up to `tolerance`."""

    group: str
    name: str
    about: str
    build: Callable[[], Peers]
    target: Target
    tolerance: float


WORKLOADS: list[Workload] = []


def workload(group: str, target: Target | float, tolerance: float = 1e-4) -> Callable[[Callable[[], Peers]], Callable]:
    """Register a function without arguments as a workload; its docstring says what the work is."""

    def register(build: Callable[[], Peers]) -> Callable[[], Peers]:
        goal = target if isinstance(target, Target) else Target(target)
        about = (build.__doc__ or "").strip()
        WORKLOADS.append(Workload(group, build.__name__, about, build, goal, tolerance))
        return build

    return register


def transforms(make: Callable[[ModuleType], Call]) -> Peers:
    """The same code on Lanewise and on torch.func: `make` gets the module and returns the call to be timed."""
    return {OWN: make(lanewise), TORCH_FUNC: make(torch.func)}


def jax() -> SimpleNamespace | None:
    """JAX on one CPU thread, or None where it is missing; `array` brings a tensor over, `call` prepares a jit."""
    if importlib.util.find_spec("jax") is None:
        return None
    module, jnp = importlib.import_module("jax"), importlib.import_module("jax.numpy")

    def array(tensor: torch.Tensor):
        return jnp.asarray(tensor.detach().numpy())

    def call(function: Callable, *arguments: object) -> Call:
        compiled = module.jit(function)
        return lambda: module.block_until_ready(compiled(*arguments))

    return SimpleNamespace(jax=module, np=jnp, nn=module.nn, lax=module.lax, array=array, call=call)
