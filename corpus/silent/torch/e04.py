import argparse
import torch
from torch import nn
from sklearn.datasets import load_digits


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=400)
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


class AutoEncoder(nn.Module):
    def __init__(self, d=64, hidden=256, code=16):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.enc = nn.Sequential(nn.Linear(d, hidden), nn.GELU(), nn.Linear(hidden, code))
        self.dec = nn.Sequential(nn.Linear(code, hidden), nn.GELU(), nn.Linear(hidden, d))
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.xavier_normal_(m.weight)
                nn.init.zeros_(m.bias)

    def forward(self, x):
        return self.dec(self.enc(self.norm(x)))


def main():
    args = get_args()
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    data = torch.tensor(load_digits().data, dtype=torch.float32)
    data = (data - data.mean(0)) / (data.std(0) + 0.1)
    train, test = data[:1500], data[1500:]

    model = AutoEncoder().to(dtype)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.99))

    def evaluate():
        with torch.no_grad():
            rec = model(test.to(dtype)).float()
            return (rec - test).pow(2).mean().item()

    print("data variance", round(test.var().item(), 4))
    for step in range(1, args.steps + 1):
        xb = train[torch.randint(0, len(train), (args.batch,))]
        rec = model(xb.to(dtype))
        loss = (rec.float() - xb).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0 or step == 1:
            print(f"step {step} train {loss.item():.4f} test {evaluate():.4f}")


if __name__ == "__main__":
    main()
