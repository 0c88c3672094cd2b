"""Learn a symmetric Hamiltonian whose low-lying eigenvectors reproduce given orbitals."""
import torch
from torch import nn

torch.manual_seed(6)


class TightBinding(nn.Module):
    """Ring of n sites, one on-site energy per site and one hopping per bond."""

    def __init__(self, n):
        super().__init__()
        self.n = n
        self.onsite = nn.Parameter(torch.zeros(n, dtype=torch.float64))
        self.hop = nn.Parameter(torch.zeros(n, dtype=torch.float64))

    def matrix(self):
        H = torch.diag(self.onsite)
        i = torch.arange(self.n)
        j = (i + 1) % self.n
        off = torch.zeros_like(H).index_put((i, j), -self.hop)
        return H + off + off.T

    def forward(self):
        return torch.linalg.eigh(self.matrix())


def density(vecs, n_occ):
    occ = vecs[:, :n_occ]
    return (occ ** 2).sum(1)


def target_density(n, n_occ):
    ref = TightBinding(n)
    with torch.no_grad():
        ref.onsite.copy_(0.8 * torch.randn(n))
        ref.hop.fill_(1.0)
        _, v = ref()
        return density(v, n_occ)


def fit(n=6, n_occ=3, iters=60):
    target = target_density(n, n_occ)
    model = TightBinding(n)
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    for it in range(iters):
        energies, vecs = model()
        loss = ((density(vecs, n_occ) - target) ** 2).sum()
        loss = loss + 1e-4 * model.onsite.pow(2).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 10 == 0:
            gap = (energies[n_occ] - energies[n_occ - 1]).item()
            print(f"{it:3d} loss {loss.item():.6f} gap {gap:.4f}")
    return model


if __name__ == "__main__":
    m = fit()
    print("on-site:", [round(v, 3) for v in m.onsite.tolist()])
