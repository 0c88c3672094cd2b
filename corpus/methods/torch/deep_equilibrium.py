"""A deep equilibrium model: the output is a fixed point, and its gradient comes from the implicit function theorem."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


def fixed_point(f, z, tolerance=1e-5, most=60):
    for _ in range(most):
        new = f(z)
        if (new - z).norm() < tolerance * (1 + new.norm()):
            return new
        z = new
    return z


class Cell(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inner = nn.Linear(dim, dim, bias=False)
        self.norm = nn.LayerNorm(dim)
        with torch.no_grad():
            self.inner.weight.mul_(0.5)

    def forward(self, z, x):
        return torch.tanh(self.inner(z) + self.norm(x))


class DEQ(nn.Module):
    def __init__(self, inputs=64, dim=64, classes=10):
        super().__init__()
        self.read = nn.Linear(inputs, dim)
        self.cell = Cell(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.read(x)
        with torch.no_grad():
            z = fixed_point(lambda z: self.cell(z, x), torch.zeros_like(x))
        z = self.cell(z, x)
        if z.requires_grad:
            z0 = z.detach().requires_grad_()
            f0 = self.cell(z0, x.detach())

            def implicit(grad):
                # u = grad + J^T u
                return fixed_point(lambda u: torch.autograd.grad(f0, z0, u, retain_graph=True)[0] + grad, grad)

            z.register_hook(implicit)
        return self.head(z)


def main(steps=250):
    torch.manual_seed(0)
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    model = DEQ()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(steps):
        pick = torch.randint(0, 1400, (128,))
        loss = F.cross_entropy(model(x[pick]), y[pick])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            print(f"{step:4d} loss {loss.item():.4f}")
    with torch.no_grad():
        print(f"test accuracy {(model(x[1400:]).argmax(1) == y[1400:]).float().mean():.3f}")


if __name__ == "__main__":
    main()
