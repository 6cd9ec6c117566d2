"""What two processes of a gloo group do with DDP modules and DTensors inside transforms; run by test_distributed.py."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from lanewise import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

F64 = torch.float64


def same(a, b):
    return a.shape == b.shape and torch.allclose(a, b)


def ddp_functional(rank, mesh, x):
    """Per-sample gradients through a DDP-wrapped module are those of the module."""
    module = torch.nn.Linear(3, 2, dtype=F64)
    wrapped = DistributedDataParallel(module)
    params = dict(module.named_parameters())
    inner = {f"module.{name}": value for name, value in params.items()}
    a = vmap(grad(lambda p, v: functional_call(module, p, (v,)).sum()), (None, 0))(params, x)
    b = vmap(grad(lambda p, v: functional_call(wrapped, p, (v,)).sum()), (None, 0))(inner, x)
    return all(same(a[name], b[f"module.{name}"]) for name in params)


def ddp_forward(rank, mesh, x):
    module = torch.nn.Linear(3, 2, dtype=F64)
    return same(vmap(DistributedDataParallel(module))(x), module(x))


def ddp_backward(rank, mesh, x):
    """Gradients of the captured parameters are averaged over the processes."""
    module = torch.nn.Linear(3, 2, dtype=F64)
    wrapped = DistributedDataParallel(module)
    vmap(lambda v: (wrapped(v) ** 2).sum())(x[rank * 2 : rank * 2 + 2]).sum().backward()
    (want,) = torch.autograd.grad((module(x) ** 2).sum(), [module.weight])
    return module.weight.grad is not None and same(module.weight.grad, want / 2)


def sharded_lanes(rank, mesh, x):
    """The lanes lie on different processes."""
    return same(
        vmap(lambda v: (v * 2).sin().sum())(distribute_tensor(x, mesh, [Shard(0)])).full_tensor(), (x * 2).sin().sum(1)
    )


def sharded_inside(rank, mesh, x):
    return same(vmap(lambda v: (v * v).sum())(distribute_tensor(x, mesh, [Shard(1)])).full_tensor(), (x * x).sum(1))


def per_lane_gradient(rank, mesh, x):
    lanes = distribute_tensor(x, mesh, [Shard(0)])
    return same(vmap(grad(lambda v: (v**3).sum()))(lanes).full_tensor(), 3 * x**2)


def gradient(rank, mesh, x):
    return same(grad(lambda v: (v**3).sum())(distribute_tensor(x, mesh, [Shard(0)])).full_tensor(), 3 * x**2)


def forward_mode(rank, mesh, x):
    lanes = distribute_tensor(x, mesh, [Shard(0)])
    return same(jvp(torch.sin, (lanes,), (lanes,))[1].full_tensor(), x.cos() * x)


def captured(rank, mesh, x):
    """A captured DTensor as the second operand."""
    w = torch.arange(6.0, dtype=F64).view(3, 2)
    weight = distribute_tensor(w, mesh, [Replicate()])
    return same(vmap(lambda v: v @ weight)(distribute_tensor(x, mesh, [Shard(0)])).full_tensor(), x @ w)


def captured_first(rank, mesh, x):
    """A captured DTensor as the first operand."""
    w = torch.arange(6.0, dtype=F64).view(2, 3)
    weight = distribute_tensor(w, mesh, [Replicate()])
    return same(vmap(lambda v: weight @ v)(distribute_tensor(x, mesh, [Shard(0)])).full_tensor(), x @ w.T)


def jacobians(rank, mesh, x):
    """Both modes, and the Hessian of each lane, of tensors that lie on all processes, and of sharded ones."""
    f = lambda v: (v**3).sum(1)
    want = torch.autograd.functional.jacobian(f, x)
    loss = lambda v: (v**3).sum() * v.sum()
    curved = torch.stack([torch.autograd.functional.hessian(loss, row) for row in x])
    right = True
    for place in (Replicate(), Shard(0), Shard(1)):
        value = distribute_tensor(x, mesh, [place])
        right &= same(jacrev(f)(value).full_tensor(), want) and same(jacfwd(f)(value).full_tensor(), want)
        right &= same(jacrev(f, chunk_size=3)(value).full_tensor(), want)
    for place in (Replicate(), Shard(0)):
        value = distribute_tensor(x, mesh, [place])
        right &= same(vmap(hessian(loss))(value).full_tensor(), curved)
    pairs = jacrev(lambda v, w: (v * w).sum(1), argnums=(0, 1))(value, value * 2)
    return right and same(
        pairs[0].full_tensor(), 2 * torch.autograd.functional.jacobian(lambda v: v.square().sum(1) / 2, x)
    )


CHECKS = [
    jacobians,
    ddp_functional,
    ddp_forward,
    ddp_backward,
    sharded_lanes,
    sharded_inside,
    per_lane_gradient,
    gradient,
    forward_mode,
    captured,
    captured_first,
]


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for check in CHECKS:
        torch.manual_seed(0)
        x = torch.randn(4, 3, dtype=F64)
        try:
            verdict = "right" if check(rank, mesh, x) else "wrong"
        except Exception as error:
            verdict = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if rank == 0:
            print(f"{check.__name__}: {verdict}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
