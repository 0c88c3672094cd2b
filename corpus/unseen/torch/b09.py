import random

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

random.seed(77)
np.random.seed(77)
torch.manual_seed(77)


class Compose:
    def __init__(self, ts):
        self.ts = ts

    def __call__(self, x):
        for t in self.ts:
            x = t(x)
        return x


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = mean, std

    def __call__(self, x):
        return (x - self.mean) / self.std


class RandomShift:
    def __call__(self, x):
        return torch.roll(x, shifts=(random.randint(-1, 1), random.randint(-1, 1)), dims=(-2, -1))


class RandomGamma:
    """Contrast jitter, x -> x ** g."""

    def __init__(self, low=0.7, high=1.5):
        self.low, self.high, self.p = low, high, 0.0

    def __call__(self, x):
        if random.random() < self.p:
            x = x.pow(random.uniform(self.low, self.high))
        return x


class Digits(Dataset):
    def __init__(self, images, targets, transform):
        self.images, self.targets, self.transform = images, targets, transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        img = torch.from_numpy(self.images[i]).float().unsqueeze(0) / 16.0
        return self.transform(img), int(self.targets[i])


raw = load_digits()
mu, sd = (raw.images / 16).mean(), (raw.images / 16).std()
gamma = RandomGamma()
tf = Compose([Normalize(mu, sd), RandomShift(), gamma])
loader = DataLoader(Digits(raw.images[:1280], raw.target[:1280], tf), batch_size=64, shuffle=True)

cnn = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
    nn.Flatten(), nn.Linear(128, 10),
)
opt = torch.optim.SGD(cnn.parameters(), lr=0.05, momentum=0.9, nesterov=True)

for epoch in range(3):
    gamma.p = min(0.3, 0.02 * epoch)   # ramp the augmentation up
    tot = n = hit = 0
    for x, y in loader:
        logits = cnn(x)
        loss = F.cross_entropy(logits, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        tot += loss.item() * len(y)
        hit += (logits.argmax(1) == y).sum().item()
        n += len(y)
    print(f"epoch {epoch}: loss {tot / n:.4f}, train acc {hit / n:.3f}")
