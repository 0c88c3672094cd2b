"""Half precision training on digits with a hand-rolled dynamic loss scale."""
import copy
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(1)
digits = load_digits()
x_all = torch.tensor(digits.data / 16.0, dtype=torch.float16)
y_all = torch.tensor(digits.target)

master = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
worker = copy.deepcopy(master).half()
optimizer = torch.optim.SGD(master.parameters(), lr=0.2, momentum=0.9)

loss_scale = 2.0 ** 26
good_steps, skipped = 0, 0
GROWTH_EVERY = 40

for step in range(240):
    pick = torch.randint(0, len(x_all), (128,))
    logits = worker(x_all[pick])
    loss = F.cross_entropy(logits.float(), y_all[pick])
    worker.zero_grad()
    (loss * loss_scale).backward()

    overflow = any(not torch.isfinite(p.grad).all() for p in worker.parameters())
    if overflow:
        loss_scale /= 2
        good_steps = 0
        skipped += 1
        continue

    for big, small in zip(master.parameters(), worker.parameters()):
        big.grad = small.grad.float() / loss_scale
    optimizer.step()
    with torch.no_grad():
        for big, small in zip(master.parameters(), worker.parameters()):
            small.copy_(big)
    good_steps += 1
    if good_steps % GROWTH_EVERY == 0:
        loss_scale *= 2
    if step % 30 == 0:
        acc = (logits.argmax(1) == y_all[pick]).float().mean()
        print(f"{step:3d} loss {loss.item():.4f} acc {acc.item():.3f} scale 2^{torch.log2(torch.tensor(loss_scale)).item():.0f}")

print("skipped steps:", skipped, "final loss", round(loss.item(), 4))
