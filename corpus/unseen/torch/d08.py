import torch
import torch.nn as nn
from sklearn.datasets import load_digits

torch.manual_seed(4)
torch.set_default_dtype(torch.float64)


def inv_sqrtm(S):
    D, V = torch.linalg.eigh(S)
    return V @ torch.diag(D.clamp_min(1e-9) ** -0.5) @ V.t()


def cca_loss(H1, H2, r=1e-3):
    """minus the sum of the canonical correlations of the two views"""
    n, d = H1.shape
    H1 = H1 - H1.mean(0)
    H2 = H2 - H2.mean(0)
    S11 = H1.t() @ H1 / (n - 1) + r * torch.eye(d)
    S22 = H2.t() @ H2 / (n - 1) + r * torch.eye(d)
    S12 = H1.t() @ H2 / (n - 1)
    T = inv_sqrtm(S11) @ S12 @ inv_sqrtm(S22)
    corr = torch.trace(torch.sqrt(T.t() @ T))
    return -corr


class View(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d_in, 40), nn.Tanh(), nn.Linear(40, d_out))

    def forward(self, x):
        return self.net(x)


class DCCA:
    def __init__(self, d1, d2, d_out=4, lr=2e-3):
        self.f, self.g = View(d1, d_out), View(d2, d_out)
        self.params = list(self.f.parameters()) + list(self.g.parameters())
        self.opt = torch.optim.RMSprop(self.params, lr=lr)
        self.history = []

    def step(self, x1, x2):
        loss = cca_loss(self.f(x1), self.g(x2))
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.history.append(loss.item())
        return loss.item()

    @torch.no_grad()
    def evaluate(self, x1, x2):
        return -cca_loss(self.f(x1), self.g(x2)).item()


if __name__ == "__main__":
    img = torch.tensor(load_digits().images / 16.0)
    img = img[torch.randperm(len(img))]
    top, bottom = img[:, :4].flatten(1), img[:, 4:].flatten(1)
    tr, te = slice(0, 1400), slice(1400, None)
    model = DCCA(32, 32)
    print("correlation of untrained nets %.4f" % model.evaluate(top[te], bottom[te]))
    k = 0
    for epoch in range(3):
        order = torch.randperm(1400)
        for idx in order.split(200):
            l = model.step(top[tr][idx], bottom[tr][idx])
            print("epoch %d step %2d loss %.4f" % (epoch, k, l))
            k += 1
        print("held out correlation %.4f" % model.evaluate(top[te], bottom[te]))
