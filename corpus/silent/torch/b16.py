"""Fine-tune a digit ConvNet on shifted, faded digits, in half the memory."""
import torch
from torch import nn
from sklearn.datasets import load_digits

torch.manual_seed(19)
DTYPE = torch.bfloat16

bunch = load_digits()
images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
target = torch.tensor(bunch.target)
shifted = 0.6 * images.roll(1, dims=3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x):
        return self.classifier(self.features(x))


def epoch_indices(n, batch):
    perm = torch.randperm(n)
    for i in range(0, n - batch + 1, batch):
        yield perm[i:i + batch]


def train(model, x, lr, epochs, label):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for epoch in range(epochs):
        losses = []
        for idx in epoch_indices(1300, 64):
            logits = model(x[idx])
            loss = nn.functional.cross_entropy(logits.float(), target[idx])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            acc = (model(x[1300:]).argmax(1) == target[1300:]).float().mean().item()
        print(f"{label} epoch {epoch + 1:2d} loss {sum(losses) / len(losses):.4f} test acc {acc:.3f}")


def main():
    model = Net()
    train(model, images, 4e-3, 4, "pretrain")
    model = model.to(DTYPE)
    train(model, shifted.to(DTYPE), 3e-5, 10, "finetune")


if __name__ == "__main__":
    main()
