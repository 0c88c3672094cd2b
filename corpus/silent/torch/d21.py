import torch
from torch import nn
from sklearn.datasets import load_diabetes


class TargetScaler(nn.Module):
    def __init__(self, y):
        super().__init__()
        self.register_buffer("mu", y.mean())
        self.register_buffer("sd", y.std())

    def encode(self, y):
        return (y - self.mu) / self.sd

    def decode(self, z):
        return z * self.sd + self.mu


class Net(nn.Module):
    def __init__(self, d, width=256, drop=0.5):
        super().__init__()
        self.a = nn.Linear(d, width)
        self.b = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        h = self.drop(torch.relu(self.a(x)))
        h = self.drop(torch.relu(self.b(h)))
        return self.out(h).squeeze(-1)


def main():
    torch.manual_seed(0)
    d = load_diabetes()
    x = torch.tensor(d.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(d.target, dtype=torch.float32) * 1e5
    perm = torch.randperm(len(x))
    tr, te = perm[:340], perm[340:]
    scaler = TargetScaler(y[tr])
    z = scaler.encode(y)
    model = Net(x.shape[1])
    opt = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-3)
    sched = torch.optim.lr_scheduler.CyclicLR(opt, base_lr=1e-4, max_lr=3e-2, step_size_up=25,
                                              mode="triangular2")
    huber = nn.HuberLoss(delta=1.0)
    for step in range(300):
        idx = tr[torch.randint(0, len(tr), (32,))]
        model.train()
        loss = huber(model(x[idx]), z[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 30 == 0:
            model.eval()
            with torch.no_grad():
                mae = (scaler.decode(model(x[te])) - y[te]).abs().mean().item()
            print(f"step {step:3d} lr {sched.get_last_lr()[0]:.4f} loss {loss.item():.4f} mae {mae:.3e}")
    model.eval()
    with torch.no_grad():
        p = scaler.decode(model(x[te]))
        r2 = 1 - ((p - y[te]) ** 2).sum() / ((y[te] - y[tr].mean()) ** 2).sum()
    print(f"FINAL r2 {r2.item():.3f}")


main()
