import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU())
        self.mid = nn.Sequential(nn.Conv2d(24, 48, 3, stride=2, padding=1), nn.BatchNorm2d(48),
                                 nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(48, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())

    def forward(self, x):
        return F.adaptive_avg_pool2d(self.last(self.mid(self.stem(x))), 2).flatten(1)


def data():
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(d.target)
    low = y < 5
    return (x[low], y[low]), (x[~low], y[~low] - 5)


def loop(forward, params, x, y, steps, tag, before=lambda: None):
    opt = torch.optim.AdamW(params)
    for step in range(steps):
        before()
        k = torch.randint(0, len(x), (64,))
        loss = F.cross_entropy(forward(x[k]), y[k])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 40 == 0 or step == steps - 1:
            print(f"[{tag}] {step:3d} loss {loss.item():.4f}")


def main():
    torch.manual_seed(0)
    (xs, ys), (xt, yt) = data()
    body, head = Backbone(), nn.Linear(256, 5)
    loop(lambda x: head(body(x)), [{"params": [*body.parameters(), *head.parameters()], "lr": 2e-3}],
         xs, ys, 100, "source")

    for part in (body.stem, body.mid):
        part.requires_grad_(False)
    head = nn.Linear(256, 5)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    groups = [{"params": body.last.parameters(), "lr": 5e-6, "weight_decay": 0.0},
              {"params": head.parameters(), "lr": 4e-3}]
    cut = 700
    loop(lambda x: head(body(x)), groups, xt[:cut], yt[:cut], 160, "target", before=body.eval)
    with torch.no_grad():
        acc = (head(body(xt[cut:])).argmax(1) == yt[cut:]).float().mean().item()
    print("target test acc", round(acc, 3))


if __name__ == "__main__":
    main()
