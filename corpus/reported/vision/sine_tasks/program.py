import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
INNER_LR, INNER_STEPS, META_BATCH = 0.02, 3, 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))

    def forward(self, x):
        return self.body(x)


def sample_task(gen):
    amp = 0.5 + 3.5 * torch.rand(1, generator=gen)
    phase = 3.14159 * torch.rand(1, generator=gen)
    x = 10 * torch.rand(20, 1, generator=gen) - 5
    y = amp * torch.sin(x + phase)
    return x[:10], y[:10], x[10:], y[10:]


def inner_update(model, sx, sy, steps=INNER_STEPS):
    learner = copy.deepcopy(model)
    for _ in range(steps):
        loss = F.mse_loss(learner(sx), sy)
        grads = torch.autograd.grad(loss, list(learner.parameters()), create_graph=True)
        for p, g in zip(learner.parameters(), grads):
            p.data = p.data - INNER_LR * g.data
    return learner


def evaluate(model, n=60):
    gen = torch.Generator().manual_seed(999)
    total = 0.0
    for _ in range(n):
        sx, sy, qx, qy = sample_task(gen)
        learner = inner_update(model, sx, sy)
        total += F.mse_loss(learner(qx), qy).item()
    return total / n


def meta_train_step(model, opt, gen):
    meta_loss = 0.0
    for _ in range(META_BATCH):
        sx, sy, qx, qy = sample_task(gen)
        learner = inner_update(model, sx, sy)
        meta_loss = meta_loss + F.mse_loss(learner(qx), qy)
    meta_loss = meta_loss / META_BATCH
    opt.zero_grad()
    meta_loss.backward()
    opt.step()
    return meta_loss.item()


if __name__ == "__main__":
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(1)
    for it in range(300):
        loss = meta_train_step(model, opt, gen)
        if it % 50 == 0:
            print(f"iter {it:4d}  meta loss {loss:.4f}")
    print("FINAL", evaluate(model))
