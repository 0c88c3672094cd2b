import torch
from torch import nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

BN = dict(momentum=0.001, eps=1e-3)


def conv_bn(cin, cout, stride=1):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, stride, 1, bias=False),
        nn.BatchNorm2d(cout, **BN),
        nn.ReLU6(inplace=True),
    )


class SmallNet(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.features = nn.Sequential(conv_bn(1, 16), conv_bn(16, 32, 2), conv_bn(32, 48, 2))
        self.fc = nn.Linear(48, classes)

    def forward(self, x):
        return self.fc(self.features(x).mean((2, 3)))


class Experiment:
    def __init__(self, lr=4e-3, batch=64, steps=200):
        d = load_digits()
        img = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1)
        lab = torch.tensor(d.target)
        perm = torch.randperm(len(img))
        self.train_x, self.train_y = img[perm[:1400]], lab[perm[:1400]]
        self.val_x, self.val_y = img[perm[1400:]], lab[perm[1400:]]
        self.net = SmallNet()
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=lr)
        self.batch, self.steps = batch, steps

    @torch.no_grad()
    def validate(self):
        self.net.eval()
        out = self.net(self.val_x)
        self.net.train()
        return (F.cross_entropy(out, self.val_y).item(),
                (out.argmax(1) == self.val_y).float().mean().item())

    def run(self):
        self.net.train()
        for step in range(self.steps):
            idx = torch.randint(0, len(self.train_x), (self.batch,))
            loss = F.cross_entropy(self.net(self.train_x[idx]), self.train_y[idx])
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            if step % 25 == 0:
                vl, va = self.validate()
                print(f"step {step:3d} train {loss.item():.3f} val {vl:.3f} acc {va:.3f}")
        vl, va = self.validate()
        print(f"FINAL train {loss.item():.3f} val {vl:.3f} acc {va:.3f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    Experiment().run()
