"""Lion, written out, with an average of the weights that is used for evaluation."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                m = state["m"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(b1 * m + (1 - b1) * p.grad), alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


class Average:
    def __init__(self, model, decay):
        self.model, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for mine, theirs in zip(self.model.state_dict().values(), model.state_dict().values()):
            if mine.dtype.is_floating_point:
                mine.lerp_(theirs, 1 - self.decay)


def accuracy(model, x, y):
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def main(steps=500):
    torch.manual_seed(0)
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
    opt = Lion(model.parameters(), lr=3e-4, weight_decay=0.3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    average = Average(model, 0.98)
    for step in range(steps):
        pick = torch.randint(0, 1400, (128,))
        loss = F.cross_entropy(model(x[pick]), y[pick], label_smoothing=0.05)
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        average.update(model)
        if step % 50 == 0:
            print(f"{step:4d} loss {loss.item():.4f}")
    model.eval()
    print(f"test accuracy {accuracy(model, x[1400:], y[1400:]):.3f} averaged {accuracy(average.model, x[1400:], y[1400:]):.3f}")


if __name__ == "__main__":
    main()
