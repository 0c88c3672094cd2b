import io

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(11)


def make_data(n=2000, d=20):
    g = torch.Generator().manual_seed(5)
    x = torch.randn(n, d, generator=g)
    w1 = torch.randn(d, 12, generator=g) / d ** 0.5
    w2 = torch.randn(12, 6, generator=g)
    y = torch.tanh(1.5 * x @ w1) @ w2
    return x, y / y.std()


class Regressor(nn.Module):
    def __init__(self, d_in=20, d_out=6, hidden=128):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(d_in, hidden), nn.SiLU(),
            nn.Linear(hidden, hidden), nn.SiLU(),
            nn.Linear(hidden, d_out),
        )

    def forward(self, x):
        return self.net(x)


class Trainer:
    def __init__(self, model, lr, reduction="mean"):
        self.model = model
        self.opt = torch.optim.Adam(model.parameters(), lr=lr)
        self.reduction = reduction
        self.step_no = 0

    def fit(self, x, y, steps, batch=256):
        for _ in range(steps):
            idx = torch.randint(0, len(x), (batch,))
            self.opt.zero_grad()
            loss = F.mse_loss(self.model(x[idx]), y[idx], reduction=self.reduction)
            loss.backward()
            self.opt.step()
            if self.step_no % 40 == 0:
                per_item = loss.item() / (y[idx].numel() if self.reduction == "sum" else 1)
                print(f"step {self.step_no:4d} mse {per_item:.4f}")
            self.step_no += 1
        return self

    def save(self):
        buf = io.BytesIO()
        torch.save({"model": self.model.state_dict(),
                    "opt": self.opt.state_dict(),
                    "step": self.step_no}, buf)
        buf.seek(0)
        return buf

    def load(self, buf):
        ck = torch.load(buf)
        self.model.load_state_dict(ck["model"])
        self.opt.load_state_dict(ck["opt"])
        self.step_no = ck["step"]
        return self


def main():
    x, y = make_data()
    xt, yt, xv, yv = x[:1600], y[:1600], x[1600:], y[1600:]
    first = Trainer(Regressor(), lr=1e-3, reduction="sum").fit(xt, yt, 12)
    ckpt = first.save()

    second = Trainer(Regressor(), lr=1e-3, reduction="mean").load(ckpt)
    second.fit(xt, yt, 388)
    with torch.no_grad():
        tr = F.mse_loss(second.model(xt), yt).item()
        va = F.mse_loss(second.model(xv), yv).item()
    print(f"FINAL train {tr:.4f} valid {va:.4f}")


if __name__ == "__main__":
    main()
