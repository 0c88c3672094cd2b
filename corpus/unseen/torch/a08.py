import torch
import torch.nn as nn
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split


class BinaryFocalLoss(nn.Module):
    def __init__(self, alpha=0.25, gamma=2.0, eps=1e-7, reduction="mean"):
        super().__init__()
        self.alpha, self.gamma, self.eps, self.reduction = alpha, gamma, eps, reduction

    def forward(self, logits, target):
        p = torch.sigmoid(logits)
        pos = -self.alpha * torch.pow(1.0 - p, self.gamma) * target * torch.log(p + self.eps)
        neg = -(1 - self.alpha) * torch.pow(p, self.gamma) * (1.0 - target) * torch.log(1.0 - p + self.eps)
        loss = pos + neg
        if self.reduction == "mean":
            return loss.mean()
        if self.reduction == "sum":
            return loss.sum()
        return loss


class Trainer:
    def __init__(self, seed=0):
        torch.manual_seed(seed)
        X, y = make_classification(n_samples=1500, n_features=12, n_informative=6, weights=[0.9],
                                   class_sep=4.0, flip_y=0.0, random_state=seed)
        parts = train_test_split(X, y, test_size=0.2, random_state=seed, stratify=y)
        self.Xtr, self.Xte, self.ytr, self.yte = (torch.tensor(p, dtype=torch.float32) for p in parts)
        self.model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        self.criterion = BinaryFocalLoss(alpha=0.5, gamma=0.5)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=2e-2)

    def run_epoch(self, batch_size=100):
        order = torch.randperm(len(self.Xtr))
        total = 0.0
        for chunk in order.split(batch_size):
            logits = self.model(self.Xtr[chunk]).squeeze(1)
            loss = self.criterion(logits, self.ytr[chunk])
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            total += loss.item() * len(chunk)
        return total / len(self.Xtr)

    @torch.no_grad()
    def recall(self):
        pred = self.model(self.Xte).squeeze(1) > 0
        tp = (pred & (self.yte == 1)).sum().item()
        return tp / max(1, int(self.yte.sum().item()))

    def fit(self, epochs=40):
        for e in range(epochs):
            loss = self.run_epoch()
            if e % 4 == 0 or loss != loss:
                print(f"[{e:02d}] loss {loss:.6f} recall {self.recall():.3f}")
            if loss != loss:
                raise FloatingPointError(f"loss became {loss} in epoch {e}")


if __name__ == "__main__":
    Trainer().fit()
