"""A spiking network: leaky integrate-and-fire neurons with a surrogate gradient, digits as rates."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class Spike(torch.autograd.Function):
    """A step forward; the derivative of a fast sigmoid backward."""

    @staticmethod
    def forward(ctx, u):
        ctx.save_for_backward(u)
        return (u > 0).to(u.dtype)

    @staticmethod
    def backward(ctx, grad):
        (u,) = ctx.saved_tensors
        return grad / (1 + 10 * u.abs()) ** 2


class LIF(nn.Module):
    def __init__(self, decay=0.9, threshold=1.0):
        super().__init__()
        self.decay, self.threshold = decay, threshold

    def forward(self, current, u):
        u = self.decay * u + current
        s = Spike.apply(u - self.threshold)
        return s, u - s.detach() * self.threshold


class SNN(nn.Module):
    def __init__(self, hidden=128, steps=20):
        super().__init__()
        self.steps = steps
        self.fc1, self.fc2 = nn.Linear(64, hidden), nn.Linear(hidden, 10)
        self.lif = LIF()

    def forward(self, x):
        u = torch.zeros(len(x), self.fc1.out_features)
        out, rates = torch.zeros(len(x), 10), 0.0
        for _ in range(self.steps):
            spikes, u = self.lif(self.fc1((torch.rand_like(x) < x).float()), u)
            out = 0.9 * out + self.fc2(spikes)
            rates = rates + spikes.mean() / self.steps
        return out / self.steps * 4, rates


def main(steps=250):
    torch.manual_seed(0)
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    net = SNN()
    opt = torch.optim.Adamax(net.parameters(), lr=5e-3)
    for step in range(steps):
        pick = torch.randint(0, 1400, (128,))
        logits, rate = net(x[pick])
        loss = F.cross_entropy(logits, y[pick]) + 0.1 * (rate - 0.1) ** 2
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            print(f"{step:4d} loss {loss.item():.4f} firing rate {rate.item():.3f}")
    with torch.no_grad():
        print(f"test accuracy {(net(x[1400:])[0].argmax(1) == y[1400:]).float().mean():.3f}")


if __name__ == "__main__":
    main()
