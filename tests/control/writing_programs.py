"""Functions of one example, `x` [3] and `y` [2, 3] float64, that write in place where values decide."""

import torch

D = torch.float64
PROGRAMS = []


def program(function):
    PROGRAMS.append(function)
    return function


@program
def add_branch(x, y):
    if x[0] > 0:
        x.add_(1)
    else:
        x.mul_(2)
    return x.sum()


@program
def before_and_in(x, y):
    x.mul_(3)
    y[0] = x
    if x[0] > 0:
        x.add_(1)
        y[1].sub_(x)
    return x.sum() + y.sum()


@program
def view(x, y):
    v = y[1]
    w = y.t()
    if x[0] > 0:
        v.add_(x)
    else:
        w[0].mul_(5)
    y.add_(1)
    return y.sum() * 1


@program
def slices(x, y):
    n = int(x[1] > 0) + 1
    y[:, :n] = x[:n]
    x[n:] = 7
    return y.sum()


@program
def iput(x, y):
    i = torch.tensor([0, 2])
    if x[1] > 0:
        y[:, i] = x[:2] * 2
    else:
        y.index_put_((torch.tensor(1), i), x[1:], accumulate=True)
    return y * 1


@program
def maskfill(x, y):
    if x[1] > 0:
        y.masked_fill_(y > x, 9.0)
    else:
        y[y < 0] = x.sum()
    return y * 1


@program
def mask_assign_many(x, y):
    m = x > 0
    x[m] = x[m] * 2 + 1
    return x * 1


@program
def outkw(x, y):
    o = torch.empty(3, dtype=D)
    if x[1] > 0:
        torch.add(x, x, out=o)
        torch.mul(x, 2, out=y[0])
    else:
        torch.sin(x, out=o)
        torch.add(y[0], y[1], out=x)
    return o


@program
def uniform_before(x, y):
    u = torch.zeros(3, dtype=D)
    v = u[1:]
    if x[1] > 0:
        u += x
    else:
        v.add_(1)
    return u * 1


@program
def uniform_in(x, y):
    u = torch.zeros(4, dtype=D)
    if x[1] > 0:
        u[int(x[0] > 0)] = 1
        u[2:] += x[1:]
    return u


@program
def made_before(x, y):
    z = x * 2
    v = z[:2]
    if x[1] > 0:
        v.mul_(3)
    elif x[0] > 0:
        z.add_(1)
        v.sub_(1)
    return z + v.sum()


@program
def made_in(x, y):
    if x[1] > 0:
        z = x * 2
        z[0] = 5
        z.t_() if z.dim() == 2 else None
        return z
    z = y[0].clone()
    z.copy_(x)
    z.exp_()
    return z


@program
def scatter(x, y):
    i = torch.tensor([[0, 1, 0], [1, 1, 0]])
    if x[1] > 0:
        y.scatter_add_(0, i, y.clone())
    else:
        y.index_add_(0, torch.tensor([1]), x[None])
        y.index_fill_(1, torch.tensor([0]), 3.0)
    return y * 1


@program
def setitem_lane_index(x, y):
    k = int((x > 0).sum())
    y[k % 2] = x
    y[:, k % 3] += 1
    return y * 1


@program
def lane_tensor_index(x, y):
    k = (x > 0).sum()
    y[k % 2] = x
    if x[0] > 0:
        y[(k + 1) % 2] -= x
    return y * 1


@program
def swap(x, y):
    if x[0] > 0:
        t = y[0].clone()
        y[0] = y[1]
        y[1] = t
    return y * 1


@program
def two_parts(x, y):
    for i in range(3):
        if x[i] > 0:
            y[:, i] += i + 1
        else:
            x[i] = -x[i]
    return y.sum() + x.sum()


@program
def returned_inputs(x, y):
    if x[0] > 0:
        x += 1
    return x, y


@program
def whiles(x, y):
    n = 0
    while x.sum() < 4 and n < 6:
        x += 0.7
        n += 1
    return x * n


@program
def aug_python(x, y):
    c = 0
    if x[0] > 0:
        c += 1
        y /= 2
    y *= c + 1
    return y.sum()


@program
def zero_fill(x, y):
    if x[2] > 0:
        x.zero_()
    elif x[1] > 0:
        x.fill_(y[0, 0])
    else:
        x.copy_(y[1])
    return x.sum()


@program
def narrow_views(x, y):
    a = y.view(-1)[::2]
    if x[2] > 0:
        a.add_(10)
    b = y.unsqueeze(0).expand(2, 2, 3)
    if x[1] > 0:
        y[0, 0] = 0
    return b.sum() + a * 1


@program
def diag(x, y):
    m = torch.outer(x, x)
    if x[0] > 0:
        m.fill_diagonal_(0)
    else:
        m.diagonal().add_(1)
    return m


@program
def resize_like(x, y):
    z = torch.zeros_like(y)
    if x[0] > 0:
        z[1] = x
    z.unsqueeze_(0).squeeze_(0).transpose_(0, 1)
    return z * 1


@program
def sort_out(x, y):
    if x[0] > 0:
        v, i = torch.sort(x)
        x.copy_(v)
    return x * 1


@program
def lists(x, y):
    parts = [x[0:1], x[1:2]]
    if x[0] > 0:
        torch._foreach_add_(parts, 1.0)
    else:
        torch._foreach_mul_(parts, 2.0)
    return x * 1


@program
def captured_uniform(x, y):
    u = torch.arange(3, dtype=D)
    if x[0] > 0:
        u = u.clone()
        u[0] = x[0]
    return u * x


@program
def detach_write(x, y):
    d = x.detach()
    if x[0] > 0:
        d.add_(1)
    return x * 1


@program
def data_write(x, y):
    if x[0] > 0:
        x.data.mul_(2)
    return x * 1


@program
def early(x, y):
    x.add_(1)
    if x[0] > 1:
        return x.sum()
    x.add_(1)
    if x[1] > 1:
        return x.prod()
    x.add_(1)
    y.zero_()
    return y.sum() + x.max()
