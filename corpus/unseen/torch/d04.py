import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from sklearn.neighbors import KNeighborsClassifier
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)


class SupConLoss(nn.Module):
    def __init__(self, temperature=0.1, base_temperature=0.1):
        super().__init__()
        self.temperature = temperature
        self.base_temperature = base_temperature

    def forward(self, features, labels):
        labels = labels.view(-1, 1)
        mask = torch.eq(labels, labels.T).float()
        logits = features @ features.T / self.temperature
        logits = logits - logits.max(dim=1, keepdim=True).values.detach()
        not_self = 1 - torch.eye(len(features))
        mask = mask * not_self
        exp_logits = torch.exp(logits) * not_self
        log_prob = logits - torch.log(exp_logits.sum(1, keepdim=True))
        mean_log_prob_pos = (mask * log_prob).sum(1) / mask.sum(1)
        return -(self.temperature / self.base_temperature) * mean_log_prob_pos.mean()


class Projector(nn.Module):
    def __init__(self, d_in, d_hid=32, d_out=8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d_in, d_hid), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(d_hid, d_hid), nn.ReLU(), nn.Linear(d_hid, d_out))

    def embed(self, x):
        return self.body(x)

    def forward(self, x):
        return F.normalize(self.head(self.body(x)), dim=1)


wine = load_wine()
X = torch.tensor(wine.data, dtype=torch.float32)
X = (X - X.mean(0)) / X.std(0)
y = torch.tensor(wine.target)
perm = torch.randperm(len(X))
tr, te = perm[:143], perm[143:]

loader = DataLoader(TensorDataset(X[tr], y[tr]), batch_size=20, shuffle=True)
model = Projector(X.shape[1])
criterion = SupConLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def knn_score():
    with torch.no_grad():
        a, b = model.embed(X[tr]).numpy(), model.embed(X[te]).numpy()
    return KNeighborsClassifier(5).fit(a, y[tr]).score(b, y[te])


print("knn before training:", round(knn_score(), 3))
it = 0
for epoch in range(5):
    running = 0.0
    for xb, yb in loader:
        xb = xb + 0.05 * torch.randn_like(xb)
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        gn = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        running += loss.item()
        if it % 4 == 0:
            print(f"it {it:3d} loss {loss.item():.4f} grad {gn.item():.3f}")
        it += 1
    print(f"epoch {epoch} mean loss {running / len(loader):.4f}")
print("knn after training:", round(knn_score(), 3))
