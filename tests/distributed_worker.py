"""What two processes of a gloo group do with DDP modules and DTensors inside transforms; run by test_distributed.py."""

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
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


def _collectives(rank):
    """What each does to one example, which every process has in a form of its own."""

    def reduced(v):
        v = v * (rank + 1)
        dist.all_reduce(v)
        return v

    def largest(v):
        v = v * (1 - 2 * rank)
        dist.all_reduce(v, dist.ReduceOp.MAX)
        return v

    def waited(v):
        v = v * (rank + 1)
        dist.all_reduce(v, async_op=True).wait()
        return v

    def sent(v):
        v = v * (rank + 1)
        dist.broadcast(v, 1)
        return v

    def gathered(v):
        parts = [torch.zeros(3, dtype=F64) for _ in range(2)]
        dist.all_gather(parts, v * (rank + 1))
        return torch.cat(parts)

    def scattered(v):
        out = torch.zeros_like(v)
        dist.scatter(out, [v, v * 2] if rank == 0 else None, 0)
        return out

    def summed_inside(v):
        return functional_collectives.all_reduce(v * (rank + 1), "sum", dist.group.WORLD) * 2

    def gathered_inside(v):
        return functional_collectives.all_gather_tensor(v * (rank + 1), 0, dist.group.WORLD) * 2

    def scattered_inside(v):
        both = torch.cat([v, v * 2]) * (rank + 1)
        return functional_collectives.reduce_scatter_tensor(both, "sum", 0, dist.group.WORLD) * 2

    return reduced, largest, waited, sent, gathered, scattered, summed_inside, gathered_inside, scattered_inside


def collectives(rank, mesh, x):
    """Each lane exchanges what is its own."""
    right = True
    for f in _collectives(rank):
        want = torch.stack([f(v) for v in x])
        right &= same(vmap(f)(x), want) and same(vmap(f, 1)(x.T.contiguous()), want)
        right &= same(vmap(vmap(f))(x.view(2, 2, 3)).flatten(0, 1), want)
        right &= same(vmap(f, chunk_size=2)(x), want)
    return right


def refused_collectives(rank, mesh, x):
    """What puts the parts of processes one after the other; and what some lanes alone would come to."""

    def into_one(v):
        out = torch.zeros(6, dtype=F64)
        dist.all_gather_into_tensor(out, v * 1)
        return out

    def in_a_branch(v):
        v = v * 1
        if v.sum() > 0:
            dist.all_reduce(v)
        return v

    total = torch.zeros(3, dtype=F64)

    def into_captured(v):
        dist.reduce_scatter(total, [v * 1, v * 2])
        return v

    messages = {into_one: "one after the other", in_a_branch: "some lanes only", into_captured: "inplace arithmetic"}
    for f, message in messages.items():
        try:
            vmap(f)(x)
        except RuntimeError as error:
            if message not in str(error):
                raise
        else:
            return False
    return True


CHECKS = [
    collectives,
    refused_collectives,
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
