import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

SEED = 7
torch.manual_seed(SEED)

digits = load_digits()
xtr, xte, ytr, yte = train_test_split(digits.images, digits.target, test_size=0.25, random_state=SEED)
to_x = lambda a: torch.tensor(a, dtype=torch.float32).unsqueeze(1) / 16.0
xtr, xte, ytr, yte = to_x(xtr), to_x(xte), torch.tensor(ytr), torch.tensor(yte)


def conv_bn(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1, bias=False),
        nn.BatchNorm2d(cout, eps=1e-3, momentum=0.001),
        nn.ReLU(inplace=True),
    )


class DigitNet(nn.Module):
    """Ported from our Keras model."""

    def __init__(self):
        super().__init__()
        self.stem = conv_bn(1, 12)
        self.mid = conv_bn(12, 24)
        self.deep = conv_bn(24, 24)
        self.fc = nn.Linear(24 * 2 * 2, 10)

    def forward(self, x):
        x = F.max_pool2d(self.mid(self.stem(x)), 2)
        x = F.max_pool2d(self.deep(x), 2)
        return self.fc(x.flatten(1))


@torch.no_grad()
def validate(net):
    net.eval()
    logits = net(xte)
    net.train()
    return F.cross_entropy(logits, yte).item(), (logits.argmax(1) == yte).float().mean().item()


net = DigitNet()
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for epoch in range(4):
    perm = torch.randperm(len(xtr))
    total = 0.0
    for idx in perm.split(64):
        opt.zero_grad()
        loss = F.cross_entropy(net(xtr[idx]), ytr[idx])
        loss.backward()
        opt.step()
        total += loss.item() * len(idx)
    vloss, vacc = validate(net)
    print(f"[{epoch}] train {total / len(xtr):.4f}  val {vloss:.4f}  val acc {vacc:.3f}")
