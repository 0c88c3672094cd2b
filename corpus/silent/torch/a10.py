import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--clip", type=float, default=0.005)
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--hidden", type=int, default=100)
    return ap.parse_args()


def get_data():
    x, y = load_digits(return_X_y=True)
    xa, xb, ya, yb = train_test_split(x, y, test_size=0.25, random_state=0)
    sc = StandardScaler().fit(xa)
    f = lambda a: torch.tensor(sc.transform(a), dtype=torch.float32)
    return f(xa), torch.tensor(ya), f(xb), torch.tensor(yb)


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.l1 = nn.Linear(64, hidden)
        self.l2 = nn.Linear(hidden, hidden)
        self.l3 = nn.Linear(hidden, 10)

    def forward(self, x):
        x = F.relu(self.l1(x))
        x = F.relu(self.l2(x))
        return self.l3(x)


def main():
    args = parse()
    torch.manual_seed(0)
    xa, ya, xb, yb = get_data()
    net = Net(args.hidden)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        perm = torch.randperm(len(xa))
        tot = 0.0
        for k in range(0, len(xa), args.batch_size):
            b = perm[k:k + args.batch_size]
            loss = F.cross_entropy(net(xa[b]), ya[b])
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), args.clip)
            opt.step()
            tot += loss.item() * len(b)
        acc = (net(xb).argmax(1) == yb).float().mean().item()
        print(f"epoch {epoch + 1}/{args.epochs}  train loss {tot / len(xa):.4f}  test acc {acc:.3f}")


if __name__ == "__main__":
    main()
