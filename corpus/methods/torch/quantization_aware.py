"""Quantization-aware training: weights and activations are rounded to four bits, straight through."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, low, high):
        q = torch.round(x / scale)
        ctx.save_for_backward((q >= low) & (q <= high))
        return q.clamp(low, high) * scale

    @staticmethod
    def backward(ctx, grad):
        (inside,) = ctx.saved_tensors
        return grad * inside, None, None, None


class QLinear(nn.Linear):
    def __init__(self, inputs, outputs, bits=4):
        super().__init__(inputs, outputs)
        self.levels = 2 ** (bits - 1) - 1
        self.register_buffer("range", torch.tensor(1.0))

    def forward(self, x):
        if self.training:
            self.range.mul_(0.95).add_(0.05 * x.detach().abs().max())
        x = FakeQuantize.apply(x, self.range / self.levels, -self.levels, self.levels)
        scale = self.weight.detach().abs().max() / self.levels
        return F.linear(x, FakeQuantize.apply(self.weight, scale, -self.levels, self.levels), self.bias)


class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layers = nn.Sequential(layer(64, 96), nn.ReLU(), layer(96, 96), nn.ReLU(), layer(96, 10))

    def forward(self, x):
        return self.layers(x)


def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        right = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return right


def main(steps=400):
    torch.manual_seed(0)
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    model = Net(QLinear)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for step in range(steps):
        pick = torch.randint(0, 1400, (128,))
        loss = F.cross_entropy(model(x[pick]), y[pick])
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        if step % 50 == 0:
            print(f"{step:4d} loss {loss.item():.4f}")
    print(f"test accuracy with four bits {accuracy(model, x[1400:], y[1400:]):.3f}")


if __name__ == "__main__":
    main()
