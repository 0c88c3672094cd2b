import torch as th
import torch.nn as nn
from sklearn.datasets import load_breast_cancer

th.manual_seed(12)
raw = load_breast_cancer()
feats = th.from_numpy(raw.data).float()
feats = (feats - feats.mean(0)) / feats.std(0)
labels = th.from_numpy(raw.target).float()
mix = th.randperm(len(feats))
train_ids, test_ids = mix[:440], mix[440:]


def weights_init(m):
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight, mean=0.0, std=0.02)
        nn.init.zeros_(m.bias)


def make_tower(d_in, d_hidden, n_hidden):
    layers = [nn.Linear(d_in, d_hidden), nn.ReLU()]
    for _ in range(n_hidden - 1):
        layers.extend([nn.Linear(d_hidden, d_hidden), nn.ReLU()])
    layers.append(nn.Linear(d_hidden, 1))
    return nn.Sequential(*layers)


def accuracy(model, ids):
    with th.no_grad():
        return ((model(feats[ids]).squeeze(1) > 0).float() == labels[ids]).float().mean().item()


tower = make_tower(30, 40, n_hidden=9)
tower.apply(weights_init)
sgd = th.optim.SGD(tower.parameters(), lr=0.03, momentum=0.9, nesterov=True)
bce = nn.BCEWithLogitsLoss()

step = 0
for epoch in range(20):
    for chunk in train_ids[th.randperm(len(train_ids))].chunk(10):
        loss = bce(tower(feats[chunk]).squeeze(1), labels[chunk])
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        if step % 20 == 0:
            print("step", step, "loss", f"{loss.item():.4f}")
        step += 1
print("train acc", round(accuracy(tower, train_ids), 3), "test acc", round(accuracy(tower, test_ids), 3))
