import torch
import torch.nn as nn
from sklearn.datasets import load_iris
from torch.distributions import Categorical, kl_divergence

torch.manual_seed(0)

# contextual bandit: the agent sees a flower and is paid 1 for naming it
data = load_iris()
X = torch.tensor(data.data, dtype=torch.float32)
X = (X - X.mean(0)) / X.std(0)
Y = torch.tensor(data.target)
keep = Y != 2
X, Y = X[keep], Y[keep]


class Policy(nn.Module):
    def __init__(self, n_in, n_act, hid=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, hid), nn.Tanh(), nn.Linear(hid, n_act))

    def forward(self, s):
        return Categorical(logits=self.net(s))


def flat(ts):
    return torch.cat([t.reshape(-1) for t in ts])


def get_params(m):
    return flat([p.data for p in m.parameters()])


def set_params(m, vec):
    i = 0
    for p in m.parameters():
        p.data.copy_(vec[i:i + p.numel()].view_as(p))
        i += p.numel()


class TRPO:
    def __init__(self, pi, max_kl=0.05, damping=1e-2, cg_iters=8):
        self.pi, self.max_kl, self.damping, self.cg_iters = pi, max_kl, damping, cg_iters

    def fisher_vp(self, s, v):
        d = self.pi(s)
        kl = kl_divergence(Categorical(logits=d.logits.detach()), d).mean()
        g = flat(torch.autograd.grad(kl, self.pi.parameters(), create_graph=True))
        hv = flat(torch.autograd.grad(g @ v, self.pi.parameters()))
        return hv + self.damping * v

    def conj_grad(self, s, b):
        x = torch.zeros_like(b)
        r, p = b.clone(), b.clone()
        rdotr = r @ r
        for _ in range(self.cg_iters):
            Ap = self.fisher_vp(s, p)
            alpha = rdotr / (p @ Ap)
            x += alpha * p
            r -= alpha * Ap
            new = r @ r
            if new < 1e-10:
                break
            p = r + (new / rdotr) * p
            rdotr = new
        return x

    def surrogate(self, s, a, adv, old_logp):
        return (torch.exp(self.pi(s).log_prob(a) - old_logp) * adv).mean()

    def update(self, s, a, adv):
        old_logp = self.pi(s).log_prob(a).detach()
        L = self.surrogate(s, a, adv, old_logp)
        g = flat(torch.autograd.grad(L, self.pi.parameters()))
        direction = self.conj_grad(s, g)
        sFs = direction @ self.fisher_vp(s, direction)
        full = torch.sqrt(2 * self.max_kl / sFs) * direction
        theta, old_pi = get_params(self.pi), Categorical(logits=self.pi(s).logits.detach())
        for k in range(8):
            set_params(self.pi, theta + 0.5 ** k * full)
            with torch.no_grad():
                kl = kl_divergence(old_pi, self.pi(s)).mean()
                better = self.surrogate(s, a, adv, old_logp) > L
            if kl > 1.5 * self.max_kl or (not better and L.abs() > 1e-6):
                continue
            break
        return L.item(), g.norm().item()


pi = Policy(X.shape[1], 2)
agent = TRPO(pi)
for it in range(50):
    i = torch.randint(0, len(X), (24,))
    s, y = X[i], Y[i]
    with torch.no_grad():
        a = pi(s).sample()
    rew = (a == y).float()
    adv = rew - rew.mean()
    adv = adv / (adv.pow(2).mean().sqrt() + 1e-8)
    L, gn = agent.update(s, a, adv)
    print(f"iter {it:2d} reward {rew.mean().item():.3f} |g| {gn:.4f} |theta| {get_params(pi).norm().item():.3f}")
