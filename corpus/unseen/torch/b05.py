"""Multi-task network: joint depth + surface-tilt regression with learned task weights."""
import torch
import torch.nn as nn
import torch.optim as optim


class MultiTaskLoss(nn.Module):
    # Kendall et al. (2018): 1/(2 s^2) * L + log s
    def __init__(self, n_tasks):
        super().__init__()
        self.sigma = nn.Parameter(torch.ones(n_tasks))

    def forward(self, losses):
        total = 0
        for i, l in enumerate(losses):
            total = total + 0.5 * l / self.sigma[i] ** 2 + torch.log(self.sigma[i])
        return total


class TwoHeads(nn.Module):
    def __init__(self, d_in=10, hidden=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d_in, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.depth = nn.Linear(hidden, 1)
        self.tilt = nn.Linear(hidden, 1)

    def forward(self, x):
        z = self.trunk(x)
        return self.depth(z), self.tilt(z)


def data(n):
    x = torch.randn(n, 10)
    a = torch.sin(x[:, :1]) + 0.5 * x[:, 1:2]
    b = 0.02 * torch.tanh(x[:, 2:3] - x[:, 3:4])
    return x, a + 0.3 * torch.randn_like(a), b


def main():
    torch.manual_seed(1234)
    x, depth, tilt = data(2048)
    model, weighting = TwoHeads(), MultiTaskLoss(2)
    params = [
        {"params": model.parameters(), "lr": 1e-2},
        {"params": weighting.parameters(), "lr": 2e-2},
    ]
    optimizer = optim.SGD(params, momentum=0.9)
    mse = nn.MSELoss()
    step = 0
    for epoch in range(10):
        for idx in torch.randperm(len(x)).split(64):
            pd, pt = model(x[idx])
            l1, l2 = mse(pd, depth[idx]), mse(pt, tilt[idx])
            loss = weighting([l1, l2])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 0:
                print(f"step {step:4d} total {loss.item():9.4f} depth {l1.item():.4f} tilt {l2.item():.6f}")
            step += 1
    print("sigmas", weighting.sigma.data.tolist())


if __name__ == "__main__":
    main()
