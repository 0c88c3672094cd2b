# Digit embeddings with the batch-all triplet loss
import torch
from sklearn.datasets import load_digits

torch.manual_seed(7)
digits = load_digits()
keep = digits.target < 4
images = torch.tensor(digits.data[keep] / 16.0, dtype=torch.float32)
labels = torch.tensor(digits.target[keep])

encoder = torch.nn.Sequential(
    torch.nn.Linear(64, 128),
    torch.nn.ReLU(),
    torch.nn.Linear(128, 16),
)
opt = torch.optim.Adam(encoder.parameters(), lr=2e-3)


def squared_distances(e):
    sq = (e * e).sum(1)
    return (sq[:, None] + sq[None, :] - 2 * e @ e.T).clamp(min=0)


def batch_all_triplet(e, y, margin=0.2):
    d = squared_distances(e)
    same = y[:, None] == y[None, :]
    not_self = ~torch.eye(len(y), dtype=torch.bool)
    # anchor i, positive j, negative k
    valid = (same & not_self)[:, :, None] & ~same[:, None, :]
    violation = d[:, :, None] - d[:, None, :] + margin
    active = (valid & (violation > 0)).float()
    loss = (violation * active).sum() / active.sum()
    return loss, active.sum() / valid.sum()


for step in range(400):
    rows = torch.randint(0, len(images), (24,))
    emb = encoder(images[rows])
    loss, fraction = batch_all_triplet(emb, labels[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}  active {100 * fraction.item():.1f}%")
