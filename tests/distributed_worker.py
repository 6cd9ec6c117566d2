"""What two processes of a gloo group do with DDP modules and DTensors inside transforms; run by test_distributed.py."""

import copy
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
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


def of_captured(rank, mesh, x):
    """Methods of captured DTensors, inside each transform."""
    return all(_of_captured(mesh, x, place) for place in (Replicate(), Shard(0), Shard(1)))


def _of_captured(mesh, x, place):
    w = torch.arange(9.0, dtype=F64).view(3, 3) / 5
    total = torch.ones(4, 3, dtype=F64) @ w.T
    weight = distribute_tensor(w, mesh, [place])
    right = True
    for f in (
        lambda v: v @ weight.full_tensor(),
        lambda v: v @ weight.redistribute(mesh, [Replicate()]).to_local(),
        lambda v: v @ (weight * 1).t().full_tensor().t(),
        lambda v: v @ weight.detach().full_tensor(),
    ):
        loss = lambda v, f=f: f(v).sum()
        right &= same(vmap(f)(x), x @ w) and same(vmap(vmap(f))(x[None])[0], x @ w)
        right &= same(grad(loss)(x), total) and same(vmap(grad(loss))(x), total)
        right &= same(jvp(f, (x,), (x,))[1], x @ w) and same(jvp(vmap(f), (x,), (x,))[1], x @ w)
        right &= same(jacfwd(f)(x[0]), w.T) and same(jacrev(f)(x[0]), w.T)
    part = weight.to_local()
    right &= same(vmap(lambda v: v.sum() * weight.to_local())(x), torch.stack([v.sum() * part for v in x]))
    right &= same(vmap(lambda v: v * weight.sum().full_tensor())(x), x * w.sum())
    right &= same(vmap(lambda v: v * len(weight.placements))(x), x)
    leaf = distribute_tensor(w, mesh, [place]).requires_grad_()
    vmap(lambda v: v @ leaf.full_tensor())(x).sum().backward()
    return right and same(leaf.grad.full_tensor(), x.sum(0)[:, None].expand(3, 3))


def whole(u):
    return u.full_tensor() if hasattr(u, "full_tensor") else u


def of_lanes(rank, mesh, x):
    """Methods of DTensors that have lanes, tangents, or a history inside the function."""
    x = torch.cat([x, x[:, :1]], 1)
    return all(_of_lanes(mesh, x, place) for place in (Replicate(), Shard(0), Shard(1)))


def _of_lanes(mesh, x, place):
    value = distribute_tensor(x, mesh, [place])
    right = True
    for way in (
        lambda u: u.full_tensor() ** 3,
        lambda u: u.redistribute(mesh, [Replicate()]).to_local() ** 3,
        lambda u: (u.redistribute(mesh, [Shard(0)]) ** 3).full_tensor(),
        lambda u: DTensor.from_local(u.full_tensor() ** 3, mesh, [Replicate()]).redistribute(mesh, [Shard(0)]),
    ):
        loss = lambda u, way=way: whole(way(u).sum())
        right &= same(whole(vmap(way)(value)), x**3)
        right &= same(vmap(loss)(value), (x**3).sum(1)) and same(whole(vmap(grad(loss))(value)), 3 * x**2)
        right &= same(whole(grad(loss)(value)), 3 * x**2)
        right &= same(whole(jvp(way, (value,), (value,))[1]), 3 * x**3)
        right &= same(whole(vmap(lambda u, way=way: jvp(way, (u,), (u,))[1])(value)), 3 * x**3)
        right &= same(whole(jacfwd(loss)(value)), 3 * x**2) and same(whole(jacrev(loss)(value)), 3 * x**2)
    parts = torch.stack([value[i].to_local() for i in range(4)])
    right &= same(vmap(lambda u: u.to_local() * 1)(value), parts)
    seen = []
    vmap(lambda u: seen.append((u.placements, u.device_mesh)) or u)(value)
    return right and seen == [(value[0].placements, mesh)]


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 8, dtype=F64)
        self.second = torch.nn.Linear(8, 2, dtype=F64)

    def forward(self, v):
        return self.second(self.first(v).tanh())


def tensor_parallel(rank, mesh, x):
    """Modules whose parameters lie on all processes, by columns and by rows."""
    module = Layers()
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    apart = parallelize_module(copy.deepcopy(module), mesh, plan)
    loss = lambda m: lambda v: m(v).square().sum()
    right = same(vmap(apart)(x), module(x))
    right &= same(vmap(apart)(distribute_tensor(x, mesh, [Replicate()])), module(x))
    right &= same(vmap(vmap(apart))(x[None])[0], module(x))
    for transform in (grad, lambda f: vmap(grad(f)), lambda f: lambda v: jvp(f, (v,), (v,))[1], jacrev, jacfwd):
        right &= same(transform(loss(apart))(x), transform(loss(module))(x))
    right &= same(jacfwd(apart)(x[0]), jacfwd(module)(x[0])) and same(jacrev(apart)(x[0]), jacrev(module)(x[0]))

    params, plain = dict(apart.named_parameters()), dict(module.named_parameters())
    for wrap in (lambda f: f, lambda f: vmap(f, (None, 0))):
        got = wrap(grad(lambda p, v: functional_call(apart, p, (v,)).square().sum()))(params, x)
        want = wrap(grad(lambda p, v: functional_call(module, p, (v,)).square().sum()))(plain, x)
        right &= all(same(whole(got[name]), want[name]) for name in want)

    for m in (apart, module):
        vmap(loss(m))(x).sum().backward()
    return right and all(same(whole(params[name].grad), plain[name].grad) for name in plain)


def captured_write(rank, mesh, x):
    """Lanes cannot be written into a DTensor from outside."""
    weight = distribute_tensor(torch.zeros(3, dtype=F64), mesh, [Replicate()])
    try:
        vmap(lambda v: weight.add_(v))(distribute_tensor(x, mesh, [Replicate()]))
    except RuntimeError as error:
        return "inplace arithmetic" in str(error) and same(weight.full_tensor(), torch.zeros(3, dtype=F64))
    return False


def drawn(rank, mesh, x):
    """Random numbers for a captured DTensor: one draw for all lanes, or an error."""
    ones = distribute_tensor(torch.ones(64, dtype=F64), mesh, [Replicate()])
    f = lambda v: torch.nn.functional.dropout(ones, 0.5).full_tensor() + 0 * v.sum()
    alike = vmap(f, randomness="same")(x)
    right = torch.equal(alike[0], alike[1]) and 0 < int((alike[0] == 0).sum()) < 64
    for randomness, message in (("error", "randomness error mode"), ("different", "its processes draw together")):
        try:
            vmap(f, randomness=randomness)(x)
        except RuntimeError as error:
            right &= message in str(error)
        else:
            return False
    return right


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

    def summed_as_list(v):
        return functional_collectives.all_reduce_coalesced([v * (rank + 1), v], "sum", dist.group.WORLD)[0] * 2

    def gathered_as_list(v):
        return functional_collectives.all_gather_into_tensor_coalesced([v * (rank + 1), v], dist.group.WORLD)[0] * 2

    def scattered_as_list(v):
        both = torch.cat([v, v * 2]) * (rank + 1)
        return functional_collectives.reduce_scatter_tensor_coalesced([both], "sum", [0], dist.group.WORLD)[0] * 2

    def exchanged_inside(v):
        both = torch.cat([v[:2], v]) * (rank + 1)
        sent = both if rank == 0 else both[[2, 3, 4, 0, 1]]
        sizes = ([2, 3], [2, 3]) if rank == 0 else ([3, 2], [3, 2])
        return functional_collectives.all_to_all_single(sent, *sizes, dist.group.WORLD) * 2

    def broadcast_inside(v):
        return functional_collectives.broadcast(v * (rank + 1), 1, dist.group.WORLD) * 2

    captured = torch.arange(3.0, dtype=F64) * (rank + 1)

    def of_captured(v):
        return v * functional_collectives.all_reduce(captured, "sum", dist.group.WORLD)

    def of_captured_list(v):
        return v * functional_collectives.all_reduce_coalesced([captured], "sum", dist.group.WORLD)[0]

    def gathered_captured(v):
        return v.sum() * functional_collectives.all_gather_tensor(captured, 0, dist.group.WORLD)

    def scattered_inside(v):
        both = torch.cat([v, v * 2]) * (rank + 1)
        return functional_collectives.reduce_scatter_tensor(both, "sum", 0, dist.group.WORLD) * 2

    of_plain = of_captured, of_captured_list, gathered_captured
    lists = summed_as_list, gathered_as_list, scattered_as_list
    inside = summed_inside, gathered_inside, scattered_inside, exchanged_inside, broadcast_inside
    return reduced, largest, waited, sent, gathered, scattered, *inside, *lists, *of_plain


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

    def in_a_branch_inside(v):
        if v.sum() > 0:
            v = functional_collectives.all_reduce(v, "sum", dist.group.WORLD)
        return v

    def one_message(v):
        return torch.ops._c10d_functional.isend(v, 1, 0, dist.group.WORLD.group_name)

    messages = {
        in_a_branch_inside: "some lanes only",
        one_message: "one message for each lane",
        into_one: "one after the other",
        in_a_branch: "some lanes only",
        into_captured: "inplace arithmetic",
    }
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
    of_captured,
    of_lanes,
    tensor_parallel,
    captured_write,
    drawn,
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
