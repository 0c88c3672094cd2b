"""Instance discrimination with a momentum encoder and a queue, on short 1-d signals."""
import copy
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
DIM, K, T_, M, BATCH, STEPS, LEN = 32, 4096, 0.15, 0.98, 64, 400, 64


def signals(n, g):
    y = torch.randint(0, 6, (n,), generator=g)
    t = torch.linspace(0, 1, LEN)[None]
    base = torch.stack([torch.sin(2 * math.pi * 3 * t[0]), torch.sign(torch.sin(2 * math.pi * 3 * t[0])),
                        torch.sin(2 * math.pi * 7 * t[0]), torch.sign(torch.sin(2 * math.pi * 7 * t[0])),
                        (t[0] * 5) % 1 * 2 - 1, torch.sin(2 * math.pi * (1 + 6 * t[0]) * t[0])])
    x = base[y] * (0.7 + 0.6 * torch.rand(n, 1, generator=g))
    return x + 0.5 * torch.randn(n, LEN, generator=g), y


def augment(x):
    shift = torch.randint(0, LEN, (x.size(0), 1))
    idx = (torch.arange(LEN)[None] + shift) % LEN
    x = x.gather(1, idx)
    x = x * (0.6 + 0.8 * torch.rand(x.size(0), 1)) + 0.2 * torch.randn_like(x)
    return x[:, None]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv1d(1, 24, 7, padding=3), nn.BatchNorm1d(24), nn.ReLU(), nn.MaxPool1d(2),
                                   nn.Conv1d(24, 48, 5, padding=2), nn.BatchNorm1d(48), nn.ReLU(),
                                   nn.AdaptiveMaxPool1d(1), nn.Flatten())
        self.proj = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, DIM))

    def forward(self, x):
        return F.normalize(self.proj(self.trunk(x)), dim=1)


g = torch.Generator().manual_seed(4)
x_all, _ = signals(4000, g)
enc_q = Encoder()
enc_k = copy.deepcopy(enc_q)
for p in enc_k.parameters():
    p.requires_grad = False
queue = F.normalize(torch.randn(DIM, K), dim=0)
ptr = 0
opt = torch.optim.SGD(enc_q.parameters(), lr=0.12, momentum=0.9, weight_decay=1e-4)

for step in range(STEPS):
    x = x_all[torch.randint(0, 4000, (BATCH,))]
    q = enc_q(augment(x))
    with torch.no_grad():
        for pq, pk in zip(enc_q.parameters(), enc_k.parameters()):
            pk.data = pk.data * M + pq.data * (1 - M)
        k = enc_k(augment(x))
    l_pos = (q * k).sum(1, keepdim=True)
    l_neg = q @ queue.clone()
    logits = torch.cat([l_pos, l_neg], 1) / T_
    loss = F.cross_entropy(logits, torch.zeros(BATCH, dtype=torch.long))
    opt.zero_grad()
    loss.backward()
    opt.step()
    queue[:, ptr:ptr + BATCH] = k.T
    ptr = (ptr + BATCH) % K
    if step % 25 == 0:
        print(f"step {step:3d} loss {loss.item():.4f} (log(K+1) = {math.log(K + 1):.3f})")

enc_q.eval()
gx, gy = signals(600, torch.Generator().manual_seed(100))
vx, vy = signals(600, torch.Generator().manual_seed(101))
with torch.no_grad():
    bank, feats = F.normalize(enc_q.trunk(gx[:, None]), dim=1), F.normalize(enc_q.trunk(vx[:, None]), dim=1)
    near = gy[(feats @ bank.T).topk(5, dim=1).indices].mode(dim=1).values
print("FINAL", (near != vy).float().mean().item())
