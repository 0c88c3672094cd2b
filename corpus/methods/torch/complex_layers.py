"""A complex-valued network that equalises a distorted radio signal."""
import torch
import torch.nn as nn

LEVELS = torch.tensor([1 + 1j, 1 - 1j, -1 + 1j, -1 - 1j]) / 2**0.5


class ComplexLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, dtype=torch.cfloat) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.cfloat))

    def forward(self, x):
        return x @ self.weight.T + self.bias


class ModReLU(nn.Module):
    """The magnitude passes a threshold, the phase stays."""

    def __init__(self, units):
        super().__init__()
        self.threshold = nn.Parameter(torch.full((units,), -0.1))

    def forward(self, z):
        size = (z.real**2 + z.imag**2 + 1e-8).sqrt()
        return z * (torch.relu(size + self.threshold) / size)


def channel(symbols, taps):
    """Echoes, a phase that depends on the power, and noise."""
    x = torch.zeros_like(symbols)
    for k, tap in enumerate(taps):
        x = x + tap * torch.roll(symbols, k, -1)
    x = x * torch.exp(0.5j * x.abs() ** 2)
    return x + 0.05 * torch.randn_like(x)


def batch(n, taps, window=7):
    index = torch.randint(0, 4, (n, 32))
    received = channel(LEVELS[index], taps)
    at = 16
    return received[:, at - window // 2 : at + window // 2 + 1], index[:, at]


def main(steps=500):
    torch.manual_seed(0)
    taps = torch.tensor([0.9, 0.4j, -0.25 + 0.1j])
    model = nn.Sequential(ComplexLinear(7, 32), ModReLU(32), ComplexLinear(32, 32), ModReLU(32), ComplexLinear(32, 1))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        x, index = batch(256, taps)
        error = model(x)[:, 0] - LEVELS[index]
        loss = (error.real**2 + error.imag**2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0:
            print(f"{step:4d} loss {loss.item():.4f}")
    with torch.no_grad():
        x, index = batch(4000, taps)
        made = (model(x)[:, :1] - LEVELS).abs().argmin(1)
        raw = (x[:, 3:4] - LEVELS).abs().argmin(1)
    print(f"symbol errors {(made != index).float().mean():.4f}, without the network {(raw != index).float().mean():.3f}")


if __name__ == "__main__":
    main()
