"""fp16 training of a wide-ish MLP on digits with a hand written dynamic loss scaler.
The scale starts far too high on purpose and is raised again regularly: overflowing steps are skipped."""
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

torch.manual_seed(2)


class DynamicScaler:
    def __init__(self, init=2.0 ** 24, growth_every=25):
        self.scale, self.every = init, growth_every
        self.good, self.skipped = 0, 0

    def unscale(self, half_params, master):
        finite = True
        for h, m in zip(half_params, master):
            m.grad = h.grad.float() / self.scale
            finite &= bool(torch.isfinite(m.grad).all())
        return finite

    def update(self, finite):
        if finite:
            self.good += 1
            if self.good % self.every == 0:
                self.scale *= 2
        else:
            self.skipped += 1
            self.good = 0
            self.scale = max(self.scale / 2, 1.0)


def mlp(params, x):
    w1, b1, w2, b2, w3, b3 = params
    h = F.relu(x @ w1 + b1)
    h = F.relu(h @ w2 + b2)
    return (h @ w3 + b3).float()


def he(fan_in, fan_out):
    return torch.randn(fan_in, fan_out) * (2 / fan_in) ** 0.5


def main():
    X, y = load_digits(return_X_y=True)
    X = torch.tensor(X / 16.0, dtype=torch.float16)
    y = torch.tensor(y)
    itr, ite = train_test_split(range(len(y)), test_size=0.2, random_state=0)
    itr, ite = torch.tensor(itr), torch.tensor(ite)

    master = [he(64, 96), torch.zeros(96), he(96, 96), torch.zeros(96), he(96, 10), torch.zeros(10)]
    master = [m.requires_grad_(True) for m in master]
    half = [m.detach().half().requires_grad_(True) for m in master]
    opt = torch.optim.Adam(master, lr=2e-3)
    scaler = DynamicScaler()

    for step in range(160):
        b = itr[torch.randint(len(itr), (64,))]
        loss = F.cross_entropy(mlp(half, X[b]), y[b])
        for h in half:
            h.grad = None
        (loss * scaler.scale).backward()
        finite = scaler.unscale(half, master)
        if finite:
            opt.step()
            with torch.no_grad():
                for h, m in zip(half, master):
                    h.copy_(m)
        gmax = max(m.grad.abs().max().item() for m in master)
        scaler.update(finite)
        opt.zero_grad()
        if step % 10 == 0:
            with torch.no_grad():
                acc = (mlp(half, X[ite]).argmax(1) == y[ite]).float().mean().item()
            print(f"step {step:3d} loss {loss.item():.4f} gmax {gmax:.3g} scale 2^{torch.tensor(scaler.scale).log2().item():.0f} skipped {scaler.skipped} acc {acc:.3f}")
    print("done, skipped", scaler.skipped, "of 160 steps, test accuracy", round(acc, 3))


if __name__ == "__main__":
    main()
