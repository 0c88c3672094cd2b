"""A sparse mixture of experts with top-2 routing and a balance loss."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class MoE(nn.Module):
    def __init__(self, dim=32, hidden=64, experts=6, top=2):
        super().__init__()
        self.top, self.experts = top, experts
        self.gate = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, dim, hidden) / dim**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, dim) / hidden**0.5)

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        weight, index = p.topk(self.top, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e in range(self.experts):
            row, slot = (index == e).nonzero(as_tuple=True)
            if len(row):
                h = F.gelu(x[row] @ self.up[e]) @ self.down[e]
                out = out.index_add(0, row, h * weight[row, slot, None])
        share = F.one_hot(index, self.experts).float().sum(1).mean(0) / self.top
        return out, self.experts * (share * p.mean(0)).sum(), share


class Net(nn.Module):
    def __init__(self, inputs=10, dim=32):
        super().__init__()
        self.read, self.moe = nn.Linear(inputs, dim), MoE(dim)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 1)

    def forward(self, x):
        h = self.read(x)
        out, balance, share = self.moe(self.norm(h))
        return self.head(h + out)[:, 0], balance, share


def data(n, centres, maps):
    """Each cluster has a map of its own."""
    kind = torch.randint(0, len(centres), (n,))
    x = centres[kind] + 0.5 * torch.randn(n, centres.shape[1])
    return x, torch.sin((x * maps[kind]).sum(1))


def main(steps=600):
    torch.manual_seed(0)
    centres, maps = 1.5 * torch.randn(6, 10), torch.randn(6, 10) / 3
    net = Net()
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for step in range(steps):
        x, y = data(256, centres, maps)
        out, balance, share = net(x)
        loss = F.mse_loss(out, y) + 0.01 * balance
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 100 == 0:
            print(f"{step:4d} loss {loss.item():.4f} balance {balance.item():.3f} least used {share.min():.3f}")
    with torch.no_grad():
        x, y = data(2000, centres, maps)
        out, _, share = net(x)
        print(f"r2 {1 - F.mse_loss(out, y) / y.var():.3f} shares {[round(s, 2) for s in share.tolist()]}")


if __name__ == "__main__":
    main()
