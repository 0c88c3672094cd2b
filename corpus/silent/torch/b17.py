"""bfloat16 network, float32 copy of the weights kept aside for the update."""
import torch
import torch.nn.functional as F
from torch import nn
from sklearn.datasets import make_moons
from sklearn.preprocessing import StandardScaler


class MasterSGD:
    """Momentum SGD on float32 copies; the low-precision weights are rounded from them."""

    def __init__(self, params, lr, momentum=0.9):
        self.low = list(params)
        self.master = [p.detach().float().clone() for p in self.low]
        self.inner = torch.optim.SGD(self.master, lr=lr, momentum=momentum)

    def zero_grad(self):
        for p in self.low:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for low, full in zip(self.low, self.master):
            full.grad = low.grad.float()
        self.inner.step()
        for low, full in zip(self.low, self.master):
            low.copy_(full)


def network():
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def main():
    torch.manual_seed(23)
    pts, lab = make_moons(1200, noise=0.12, random_state=0)
    pts = torch.tensor(StandardScaler().fit_transform(pts), dtype=torch.bfloat16)
    lab = torch.tensor(lab)
    net = network().bfloat16()
    opt = MasterSGD(net.parameters(), lr=0.02)
    for it in range(300):
        idx = torch.randint(0, 1000, (64,))
        loss = F.cross_entropy(net(pts[idx]).float(), lab[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 50 == 49 or it == 0:
            print(f"iteration {it + 1}: loss {loss.item():.4f}")
    with torch.no_grad():
        acc = (net(pts[1000:]).argmax(1) == lab[1000:]).float().mean().item()
    print(f"test accuracy {acc:.3f}")


main()
