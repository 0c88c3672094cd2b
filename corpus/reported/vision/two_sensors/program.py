import numpy as np
import torch
from torch import nn
from torch.autograd import Function

torch.manual_seed(1)
rng = np.random.default_rng(1)


class RevGrad(Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return -ctx.alpha * grad_output, None


def sensor(n, domain):
    y = rng.integers(0, 3, n)
    centers = np.array([[0, 2.0], [1.8, -1.0], [-1.8, -1.0]])
    sig = centers[y] + 0.7 * rng.normal(size=(n, 2))
    off = np.where(domain == 0, -1.0, 1.0) * np.ones((n, 1))
    nuis = off * 2.0 + 0.5 * rng.normal(size=(n, 1))
    mix = 0.9 * sig[:, :1] + (3.0 if domain else 0.0)
    x = np.concatenate([sig, nuis, mix, rng.normal(size=(n, 6))], 1)
    if domain == 0:
        x[:, 2] += 1.2 * (y - 1)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


feature = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
class_classifier = nn.Linear(32, 3)
domain_classifier = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
params = [*feature.parameters(), *class_classifier.parameters(), *domain_classifier.parameters()]
optimizer = torch.optim.Adam(params, lr=1e-3)
ce = nn.CrossEntropyLoss()

xs, ys = sensor(3000, 0)
xt, _ = sensor(3000, 1)
xe, ye = sensor(1000, 1)
n_iter = 400
for i in range(n_iter):
    p = i / n_iter
    alpha = 2.0 / (1.0 + np.exp(-10 * p)) - 1
    js, jt = torch.randint(0, 3000, (1024,)), torch.randint(0, 3000, (1024,))
    fs, ft = feature(xs[js]), feature(xt[jt])
    err_s_label = ce(class_classifier(fs), ys[js])
    err_s_domain = ce(domain_classifier(RevGrad.apply(fs, alpha)), torch.zeros(1024, dtype=torch.long))
    err_t_domain = ce(domain_classifier(RevGrad.apply(ft, alpha)), torch.ones(1024, dtype=torch.long))
    err = err_s_label + err_s_domain + err_t_domain
    optimizer.zero_grad()
    err.backward()
    optimizer.step()
    if i % 50 == 0 or i == n_iter - 1:
        print(f"iter {i}: label {err_s_label.item():.4f} s_domain {err_s_domain.item():.4f} t_domain {err_t_domain.item():.4f}")

with torch.no_grad():
    print("source err", (class_classifier(feature(xs)).argmax(1) != ys).float().mean().item())
    print("FINAL", (class_classifier(feature(xe)).argmax(1) != ye).float().mean().item())
