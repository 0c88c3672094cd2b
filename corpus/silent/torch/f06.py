import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def sample(n, g, dirs, maps):
    which = torch.randint(0, len(dirs), (n,), generator=g)
    x = 2.0 * dirs[which] + torch.randn(n, dirs.shape[1], generator=g)
    y = torch.einsum("ni,nij->nj", x, maps[which])
    return x, y


class Experts(nn.Module):
    def __init__(self, n_experts, d_in, d_hidden, d_out):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(n_experts, d_in, d_hidden) / d_in ** 0.5)
        self.w2 = nn.Parameter(torch.randn(n_experts, d_hidden, d_out) / d_hidden ** 0.5)
        self.b1 = nn.Parameter(torch.zeros(n_experts, 1, d_hidden))

    def forward(self, x):
        h = torch.relu(torch.einsum("ni,eij->enj", x, self.w1) + self.b1)
        return torch.einsum("enj,ejk->enk", h, self.w2)


class MoE(nn.Module):
    def __init__(self, n_experts, d_in, d_hidden, d_out):
        super().__init__()
        self.router = nn.Linear(d_in, n_experts)
        self.experts = Experts(n_experts, d_in, d_hidden, d_out)

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        gate, pick = probs.max(-1)
        rows = torch.arange(len(x))
        out = self.experts(x)[pick, rows]
        usage = probs.mean(0)
        entropy = -(usage * usage.clamp_min(1e-9).log()).sum()
        load = torch.bincount(pick, minlength=probs.shape[1]) / len(x)
        return gate[:, None] * out, entropy, load


def main(args):
    g = torch.Generator().manual_seed(args.seed)
    torch.manual_seed(args.seed)
    dirs = F.normalize(torch.randn(args.experts, args.dim, generator=g), dim=-1) * 2
    maps = torch.randn(args.experts, args.dim, 4, generator=g) / args.dim ** 0.5
    model = MoE(args.experts, args.dim, args.hidden, 4)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        x, y = sample(args.batch, g, dirs, maps)
        pred, entropy, load = model(x)
        task = F.mse_loss(pred, y)
        loss = task + args.balance * entropy
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 40 == 0:
            shares = " ".join(f"{v:.2f}" for v in load.tolist())
            print(f"{step:4d} mse {task.item():.4f} entropy {entropy.item():.3f} load [{shares}]")
    x, y = sample(2000, g, dirs, maps)
    with torch.no_grad():
        pred, _, load = model(x)
    print(f"final mse {F.mse_loss(pred, y).item():.4f}  target variance {y.var().item():.4f}")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--experts", type=int, default=6)
    p.add_argument("--dim", type=int, default=8)
    p.add_argument("--hidden", type=int, default=16)
    p.add_argument("--batch", type=int, default=256)
    p.add_argument("--steps", type=int, default=400)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--balance", type=float, default=0.5)
    p.add_argument("--seed", type=int, default=0)
    main(p.parse_args())
