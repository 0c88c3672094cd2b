import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch.utils.data import DataLoader, TensorDataset

SEED = 11
np.random.seed(SEED)
torch.manual_seed(SEED)

# ---- data -------------------------------------------------------------
bunch = load_diabetes()
X = bunch.data / bunch.data.std(axis=0)
y = (bunch.target - bunch.target.mean()) / bunch.target.std()
X, y = X.astype(np.float32), y.astype(np.float32)
n_train = 340
train = TensorDataset(torch.from_numpy(X[:n_train]), torch.from_numpy(y[:n_train]))
X_val, y_val = torch.from_numpy(X[n_train:]), y[n_train:]
loader = DataLoader(train, batch_size=34, shuffle=True)

# ---- model ------------------------------------------------------------
model = torch.nn.Sequential(
    torch.nn.Linear(10, 32),
    torch.nn.ReLU(),
    torch.nn.Linear(32, 1),
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)


def mse(pred, target):
    return ((pred - target) ** 2).mean()


def r2(model):
    with torch.no_grad():
        p = model(X_val).numpy().ravel()
    return 1 - ((p - y_val) ** 2).sum() / ((y_val - y_val.mean()) ** 2).sum()


# ---- training ---------------------------------------------------------
for epoch in range(25):
    running = []
    for xb, yb in loader:
        optimizer.zero_grad()
        out = model(xb)
        loss = mse(out, yb)
        loss.backward()
        optimizer.step()
        running.append(loss.item())
    if epoch % 4 == 0:
        print(f"epoch {epoch}: loss={np.mean(running):.4f}  val R2={r2(model):.3f}")

print("final metric: val R2 %.4f" % r2(model))
