import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F


def block_graph(n, classes, p_in, p_out, gen):
    y = torch.arange(n) % classes
    prob = torch.where(y[:, None] == y[None, :], p_in, p_out)
    upper = torch.triu(torch.rand(n, n, generator=gen) < prob, diagonal=1).float()
    a = upper + upper.t() + torch.eye(n)
    d = a.sum(1).rsqrt()
    return d[:, None] * a * d[None, :], y


class GCN(nn.Module):
    def __init__(self, d_in, hidden, classes, dropout):
        super().__init__()
        self.w1 = nn.Linear(d_in, hidden)
        self.w2 = nn.Linear(hidden, hidden)
        self.w3 = nn.Linear(hidden, classes)
        self.dropout = dropout

    def forward(self, a, x):
        x = F.relu(self.w1(a @ x))
        x = F.dropout(x, self.dropout, self.training)
        x = F.relu(self.w2(a @ x))
        return self.w3(x)


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--nodes", type=int, default=600)
    p.add_argument("--hidden", type=int, default=32)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--adam-eps", type=float, default=0.1)
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--dropout", type=float, default=0.2)
    return p.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(3)
    classes = 4
    a, y = block_graph(args.nodes, classes, 0.06, 0.012, gen)
    means = torch.randn(classes, 16, generator=gen) * 0.5
    x = means[y] + torch.randn(args.nodes, 16, generator=gen)
    order = torch.randperm(args.nodes, generator=gen)
    train, test = order[:200], order[200:]

    model = GCN(16, args.hidden, classes, args.dropout)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr, eps=args.adam_eps)
    for step in range(args.steps):
        model.train()
        opt.zero_grad()
        loss = F.cross_entropy(model(a, x)[train], y[train])
        loss.backward()
        opt.step()
        if step % 25 == 0 or step == args.steps - 1:
            model.eval()
            with torch.no_grad():
                acc = (model(a, x)[test].argmax(1) == y[test]).float().mean().item()
            print(f"step {step:3d} loss {loss.item():.4f} test acc {acc:.3f}")


if __name__ == "__main__":
    main()
