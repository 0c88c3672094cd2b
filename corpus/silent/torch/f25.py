import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.aux = nn.Linear(16, 10)
        self.fc = nn.Linear(128, 10)

    def forward(self, x):
        a = F.max_pool2d(F.relu(self.conv1(x)), 2)
        b = F.max_pool2d(F.relu(self.conv2(a)), 2)
        return self.fc(b.flatten(1)), self.aux(a.mean((2, 3)))


class Runner:
    micro, accumulate, max_norm, aux_weight = 8, 8, 5.0, 1e-4

    def __init__(self):
        torch.manual_seed(11)
        d = load_digits()
        self.x = torch.tensor(d.images, dtype=torch.float32)[:, None] / 16
        self.y = torch.tensor(d.target)
        self.net = Net()
        decay = [p for p in self.net.parameters() if p.ndim > 1]
        plain = [p for p in self.net.parameters() if p.ndim <= 1]
        self.opt = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.02}, {"params": plain, "weight_decay": 0.0}], lr=3e-3
        )

    def micro_loss(self):
        i = torch.randint(0, 1400, (self.micro,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            main, aux = self.net(self.x[i])
        main, aux = main.float(), aux.float()
        return F.cross_entropy(main, self.y[i]) + self.aux_weight * F.cross_entropy(aux, self.y[i])

    def fit(self, updates=120):
        total = 0.0
        for m in range(updates * self.accumulate):
            loss = self.micro_loss() / self.accumulate
            loss.backward()
            total += loss.item()
            if (m + 1) % self.accumulate:
                continue
            norm = nn.utils.clip_grad_norm_(self.net.parameters(), self.max_norm)
            self.opt.step()
            self.opt.zero_grad(set_to_none=True)
            update = (m + 1) // self.accumulate
            if update % 12 == 1:
                print(f"update {update:3d} loss {total:.4f} norm {norm.item():.3f}")
            total = 0.0

    @torch.no_grad()
    def test(self):
        out, _ = self.net.eval()(self.x[1400:])
        print(f"test acc {(out.argmax(1) == self.y[1400:]).float().mean().item():.3f}")


if __name__ == "__main__":
    r = Runner()
    r.fit()
    r.test()
