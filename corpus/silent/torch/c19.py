# functional-style MLP with hand-made parameters, two-moons-like spirals
import math
import torch
import torch.nn.functional as F

torch.manual_seed(31)


def spirals(n, noise=0.08):
    t = torch.sqrt(torch.rand(n)) * 1.5 * math.pi + 0.3
    c = torch.randint(0, 2, (n,))
    s = 1.0 - 2.0 * c
    x = torch.stack([s * t * torch.cos(t), s * t * torch.sin(t)], 1) / 3.0
    return x + noise * torch.randn(n, 2), c


def init_params(sizes):
    params = []
    for fan_in, fan_out in zip(sizes[:-1], sizes[1:]):
        w = torch.randn(fan_in, fan_out) * math.sqrt(2.0 / fan_in)
        b = torch.full((fan_out,), -2.0)
        params += [w.requires_grad_(), b.requires_grad_()]
    return params


def forward(params, x):
    n = len(params) // 2
    for i in range(n):
        x = x @ params[2 * i] + params[2 * i + 1]
        if i < n - 1:
            x = F.relu(x)
    return x


params = init_params([2, 64, 64, 64, 2])
opt = torch.optim.Adam(params, lr=2e-3)
xtest, ytest = spirals(1000)
for step in range(301):
    x, y = spirals(128)
    loss = F.cross_entropy(forward(params, x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 50 == 0:
        with torch.no_grad():
            acc = (forward(params, xtest).argmax(1) == ytest).float().mean().item()
        print("step {:4d}  loss {:.4f}  test acc {:.3f}".format(step, loss.item(), acc))
print("final metric: test acc %.4f" % acc)
