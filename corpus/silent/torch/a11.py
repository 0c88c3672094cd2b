# pre-train on parity (odd / even), then train a new classifier for the ten digits on the frozen features
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(21)
digits = load_digits()
x_all = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8.0 - 1.0
y_all = torch.tensor(digits.target)
split = 1400


class SmallCNN(nn.Module):
    def __init__(self, n_out):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten())
        self.fc = nn.Linear(32 * 16, n_out)

    def forward(self, x):
        return self.fc(self.features(x))


def train(model, optimizer, labels, steps, tag):
    for step in range(steps):
        i = torch.randint(0, split, (64,))
        loss = F.cross_entropy(model(x_all[i]), labels[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"{tag} step {step:3d} loss {loss.item():.4f}")


def evaluate(model, labels):
    with torch.no_grad():
        return (model(x_all[split:]).argmax(1) == labels[split:]).float().mean().item()


model = SmallCNN(2)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
train(model, optimizer, y_all % 2, 60, "parity")
print("parity accuracy", round(evaluate(model, y_all % 2), 3))

for p in model.features.parameters():
    p.requires_grad = False
model.fc = nn.Linear(model.fc.in_features, 10)
train(model, optimizer, y_all, 160, "digits")
print("digit accuracy", round(evaluate(model, y_all), 3))
