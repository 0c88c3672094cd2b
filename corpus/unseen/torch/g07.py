import torch
from sklearn.datasets import load_breast_cancer

# schedule-free SGD: the evaluation point x is a weighted running average of the fast iterate z

class AveragedSGD:
    def __init__(self, params, lr=0.5, warmup=20, beta=0.9, weight_decay=1e-4):
        self.x = list(params)
        self.z = [p.detach().clone() for p in self.x]
        self.lr, self.warmup, self.beta, self.wd = lr, warmup, beta, weight_decay
        self.k = 0
        self.weight_sum = torch.zeros(())
        self.saved = None

    @torch.no_grad()
    def to_train_point(self):
        self.saved = [p.clone() for p in self.x]
        for p, z in zip(self.x, self.z):
            p.mul_(self.beta).add_(z, alpha=1 - self.beta)

    @torch.no_grad()
    def step(self):
        warm = min(1.0, self.k / self.warmup)
        lr = torch.tensor(self.lr * warm)
        weight = lr ** 2
        self.weight_sum += weight
        c = weight / self.weight_sum
        for p, z, x_old in zip(self.x, self.z, self.saved):
            g = p.grad + self.wd * p
            z.sub_(lr * g)
            p.copy_((1 - c) * x_old + c * z)
        self.k += 1


data = load_breast_cancer()
X = torch.tensor(data.data, dtype=torch.float32)
X = (X - X.mean(0)) / X.std(0)
y = torch.tensor(data.target, dtype=torch.float32)

torch.manual_seed(4)
model = torch.nn.Sequential(torch.nn.Linear(30, 24), torch.nn.SiLU(), torch.nn.Linear(24, 1))
loss_fn = torch.nn.BCEWithLogitsLoss()
opt = AveragedSGD(model.parameters())

for it in range(200):
    rows = torch.randint(0, len(X), (64,))
    opt.to_train_point()
    model.zero_grad()
    loss = loss_fn(model(X[rows]).squeeze(1), y[rows])
    loss.backward()
    opt.step()
    if it % 20 == 0:
        with torch.no_grad():
            full = loss_fn(model(X).squeeze(1), y)
        print(f"it {it:3d}  batch {loss.item():.4f}  averaged {full.item():.4f}")
