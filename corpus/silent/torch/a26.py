# heating demand (around 300 units) from weather sequences, GRU, raw units on purpose
import torch
from torch import nn

torch.manual_seed(26)
g = torch.Generator().manual_seed(260)


def weather(n, t=16):
    temp = torch.randn(n, t, generator=g).cumsum(1) * 0.3
    wind = torch.rand(n, t, generator=g)
    w = torch.linspace(0.2, 1.0, t)
    demand = 300 - 25 * (temp * w).mean(1) + 60 * (wind * w).mean(1) + 2 * torch.randn(n, generator=g)
    return torch.stack([temp, wind], -1), demand


class Demand(nn.Module):
    def __init__(self, mean, hidden=40):
        super().__init__()
        self.cell = nn.GRUCell(2, hidden)
        self.hidden = hidden
        self.out = nn.Linear(hidden, 1)
        nn.init.constant_(self.out.bias, mean)

    def forward(self, x):
        h = x.new_zeros(len(x), self.hidden)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.out(h)[:, 0]


x_tr, y_tr = weather(1500)
x_te, y_te = weather(400)
model = Demand(y_tr.mean().item())
decoupled = [{"params": model.cell.parameters(), "lr": 5e-3}, {"params": model.out.parameters(), "lr": 5e-2}]
opt = torch.optim.Adam(decoupled)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=250)

for step in range(250):
    i = torch.randint(0, 1500, (64,))
    loss = (model(x_tr[i]) - y_tr[i]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    if step % 25 == 0 or step == 249:
        with torch.no_grad():
            err = model(x_te) - y_te
        print(f"{step:4d} loss {loss.item():10.3f} test rmse {err.square().mean().sqrt():8.3f} R2 {1 - err.var() / y_te.var():.3f}")
