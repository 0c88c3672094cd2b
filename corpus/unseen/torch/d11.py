import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

torch.manual_seed(8)


class SpikeFn(torch.autograd.Function):
    """Heaviside forwards, derivative of a steep sigmoid backwards"""
    slope = 25.0

    @staticmethod
    def forward(ctx, mem):
        ctx.save_for_backward(mem)
        return (mem > 0).float()

    @staticmethod
    def backward(ctx, grad_out):
        (mem,) = ctx.saved_tensors
        e = torch.exp(-SpikeFn.slope * mem)
        return grad_out * SpikeFn.slope * e / (1 + e) ** 2


spike = SpikeFn.apply


class LIF(nn.Module):
    def __init__(self, beta=0.85, thr=0.6):
        super().__init__()
        self.beta, self.thr = beta, thr

    def forward(self, cur, mem):
        mem = self.beta * mem + cur
        s = spike(mem - self.thr)
        return s, mem - s.detach() * self.thr


class SNN(nn.Module):
    def __init__(self, n_in=64, n_hid=80, n_out=10, T=8):
        super().__init__()
        self.T = T
        self.fc1, self.fc2 = nn.Linear(n_in, n_hid), nn.Linear(n_hid, n_out)
        self.l1, self.l2 = LIF(), LIF()
        nn.init.uniform_(self.fc1.weight, -0.06, 0.08)

    def forward(self, x):
        m1 = x.new_zeros(len(x), self.fc1.out_features)
        m2 = x.new_zeros(len(x), self.fc2.out_features)
        counts, rate = 0.0, 0.0
        for _ in range(self.T):
            inp = torch.bernoulli(x)
            s1, m1 = self.l1(self.fc1(inp), m1)
            s2, m2 = self.l2(self.fc2(s1), m2)
            counts = counts + s2
            rate = rate + s1.mean().item() / self.T
        return counts, rate


d = load_digits()
Xtr, Xte, ytr, yte = train_test_split(d.data / 16.0, d.target, test_size=300, random_state=0)
Xtr, Xte = torch.tensor(Xtr, dtype=torch.float32), torch.tensor(Xte, dtype=torch.float32)
ytr, yte = torch.tensor(ytr), torch.tensor(yte)

snn = SNN()
opt = torch.optim.AdamW(snn.parameters(), lr=6e-3)
accum = 2

for step in range(36):
    for k in range(accum):
        i = torch.randint(0, len(Xtr), (48,))
        counts, rate = snn(Xtr[i])
        loss = F.cross_entropy(counts / 2, ytr[i]) / accum
        loss.backward()
    gn = nn.utils.clip_grad_norm_(snn.parameters(), 2.0)
    opt.step()
    opt.zero_grad()
    if step % 3 == 0:
        with torch.no_grad():
            acc = (snn(Xte)[0].argmax(1) == yte).float().mean().item()
        print(f"step {step:2d} loss {accum * loss.item():.4f} |g| {gn.item():.4f} hidden rate {rate:.3f} acc {acc:.3f}")
