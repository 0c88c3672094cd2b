# logistic regression on top of a small learned feature map.
# The last layer is refitted by IRLS (newton) every few epochs, the feature map by SGD.
import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer

torch.manual_seed(8)


def standardise(a):
    a = torch.tensor(a, dtype=torch.float32)
    return (a - a.mean(0)) / a.std(0)


class FeatureMap(torch.nn.Module):
    def __init__(self, din, dout):
        super().__init__()
        self.lin = torch.nn.Linear(din, dout)

    def forward(self, x):
        return torch.cat([torch.tanh(self.lin(x)), torch.ones(len(x), 1)], dim=1)


def irls(phi, t, beta, n_iter, ridge=1e-4):
    """iteratively reweighted least squares, returns the new coefficients"""
    eye = torch.eye(phi.shape[1])
    for _ in range(n_iter):
        eta = phi @ beta
        p = torch.sigmoid(eta)
        w = p * (1 - p)
        z = eta + (t - p) / w
        A = phi.t() @ (w[:, None] * phi) + ridge * eye
        beta = torch.linalg.solve(A, phi.t() @ (w * z))
    return beta


def fit(name, x, t, rounds=12, inner=8, width=6):
    n = len(x)
    perm = torch.randperm(n)
    tr, te = perm[: int(0.8 * n)], perm[int(0.8 * n):]
    fmap = FeatureMap(x.shape[1], width)
    beta = torch.zeros(width + 1)
    opt = torch.optim.SGD(fmap.parameters(), lr=0.05, momentum=0.5)
    history = []
    for r in range(rounds):
        with torch.no_grad():
            beta = irls(fmap(x[tr]), t[tr], beta, n_iter=2)
        for _ in range(inner):
            logits = fmap(x[tr]) @ beta
            loss = F.binary_cross_entropy_with_logits(logits, t[tr])
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            out = fmap(x[te]) @ beta
            acc = ((out > 0).float() == t[te]).float().mean().item()
        history.append(loss.item())
        print(f"{name:8s} round {r:2d} loss {loss.item():.5f} |beta| {beta.norm().item():9.3f} test acc {acc:.3f}")
    return history


def main():
    bc = load_breast_cancer()
    fit("cancer", standardise(bc.data), torch.tensor(bc.target).float())


if __name__ == "__main__":
    main()
