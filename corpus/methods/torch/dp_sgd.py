"""DP-SGD: per-sample gradients by vmap, each clipped, with noise on their sum."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.func import functional_call, grad_and_value, vmap


def per_sample(model):
    def loss(params, x, y):
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    return vmap(grad_and_value(loss), in_dims=(None, 0, 0))


def private(grads, bound, noise, batch):
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    factor = (bound / (norms + 1e-6)).clamp(max=1.0)
    out = {}
    for name, g in grads.items():
        total = torch.einsum("n,n...->...", factor, g)
        out[name] = (total + noise * bound * torch.randn_like(total)) / batch
    return out, norms


def main(steps=300, batch=256, bound=1.0, noise=0.6):
    torch.manual_seed(0)
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    gradients = per_sample(model)
    for step in range(steps):
        pick = torch.randint(0, 1400, (batch,))
        params = {name: p.detach() for name, p in model.named_parameters()}
        grads, losses = gradients(params, x[pick], y[pick])
        grads, norms = private(grads, bound, noise, batch)
        for name, p in model.named_parameters():
            p.grad = grads[name]
        opt.step()
        opt.zero_grad()
        if step % 50 == 0:
            print(f"{step:4d} loss {losses.mean():.4f} clipped {(norms > bound).float().mean():.2f}")
    with torch.no_grad():
        print(f"test accuracy {(model(x[1400:]).argmax(1) == y[1400:]).float().mean():.3f}")


if __name__ == "__main__":
    main()
