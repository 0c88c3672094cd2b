import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(12)
DIM, CLASSES = 64, 10


def mlp(sizes, last_bn=False):
    layers = []
    for i, (a, b) in enumerate(zip(sizes[:-1], sizes[1:])):
        last = i == len(sizes) - 2
        layers.append(nn.Linear(a, b, bias=last and not last_bn))
        if not last:
            layers += [nn.BatchNorm1d(b), nn.ReLU(inplace=True)]
        elif last_bn:
            layers.append(nn.BatchNorm1d(b, affine=False))
    return nn.Sequential(*layers)


class SimSiam(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = mlp([DIM, 256, 128])
        self.projector = mlp([128, 128, 128], last_bn=True)
        self.predictor = mlp([128, 32, 128])

    def forward(self, x1, x2):
        z1, z2 = self.projector(self.encoder(x1)), self.projector(self.encoder(x2))
        p1, p2 = self.predictor(z1), self.predictor(z2)
        return p1, p2, z1.detach(), z2.detach()


class_means = torch.randn(CLASSES, 12) * 1.3
mixing = torch.randn(12, DIM) / 12 ** 0.5
nuisance = torch.randn(30, DIM) / 30 ** 0.5


def dataset(n):
    y = torch.randint(CLASSES, (n,))
    signal = torch.tanh((class_means[y] + 0.5 * torch.randn(n, 12)) @ mixing)
    return signal, y


def augment(signal):
    x = signal + 1.4 * torch.randn(len(signal), 30) @ nuisance
    return x * (torch.rand_like(x) > 0.15)


x_train, y_train = dataset(5000)
x_test, y_test = dataset(1500)
model = SimSiam()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)


@torch.no_grad()
def probe_error():
    model.eval()
    f_train = F.normalize(model.encoder(augment(x_train)), dim=-1)
    f_test = F.normalize(model.encoder(augment(x_test)), dim=-1)
    near = (f_test @ f_train.T).topk(20, dim=-1).indices
    pred = F.one_hot(y_train[near], CLASSES).sum(1).argmax(-1)
    model.train()
    return (pred != y_test).float().mean().item()


print("knn error before training", probe_error())
for step in range(300):
    x = x_train[torch.randint(len(x_train), (256,))]
    p1, p2, z1, z2 = model(augment(x), augment(x))
    loss = -(F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean()) * 0.5
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 30 == 0:
        std = F.normalize(z1, dim=1).std(0).mean().item()
        print(f"step {step} loss {loss.item():.4f} output std {std:.4f}")
print("FINAL", probe_error())
