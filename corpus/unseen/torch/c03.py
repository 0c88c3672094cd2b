# matrix factorisation on a stream of ratings (ordered by time), adagrad by hand
import torch

g = torch.Generator().manual_seed(11)
N_USER, N_ITEM, DIM = 60, 48, 8
LR, REG = 0.15, 0.02
BATCH, STEPS = 512, 60


def simulate():
    """ratings in 1..5, the catalogue grows a little over time"""
    pu = torch.randn(N_USER, 3, generator=g) * 0.7
    qi = torch.randn(N_ITEM, 3, generator=g) * 0.7
    bias = torch.randn(N_ITEM, generator=g) * 0.4
    available_from = torch.zeros(N_ITEM)
    available_from[-4:] = torch.tensor([0.4, 0.45, 0.6, 0.8])
    rows = []
    n = BATCH * STEPS
    u = torch.randint(0, N_USER, (n,), generator=g)
    i = torch.randint(0, N_ITEM, (n,), generator=g)
    t = torch.arange(n) / n
    old = torch.randint(0, N_ITEM - 4, (n,), generator=g)
    i = torch.where(t < available_from[i], old, i)
    noise = 0.3 * torch.randn(n, generator=g)
    r = (3.4 + bias[i] + (pu[u] * qi[i]).sum(1) + noise).clamp(1, 5)
    return u, i, r


def init_params():
    return {
        "P": 0.1 * torch.randn(N_USER, DIM, generator=g),
        "Q": 0.1 * torch.randn(N_ITEM, DIM, generator=g),
        "bu": torch.zeros(N_USER),
        "bi": 0.01 * torch.randn(N_ITEM, generator=g),
        "mu": torch.tensor(3.0),
    }


def predict(p, u, i):
    return p["mu"] + p["bu"][u] + p["bi"][i] + (p["P"][u] * p["Q"][i]).sum(-1)


def objective(p, u, i, r):
    err = predict(p, u, i) - r
    l2 = p["P"][u].pow(2).sum(1) + p["Q"][i].pow(2).sum(1) + p["bu"][u].pow(2) + p["bi"][i].pow(2)
    return err.pow(2).mean() + REG * l2.mean()


class AdaGrad:
    def __init__(self, params, lr):
        self.lr = lr
        self.acc = {k: torch.zeros_like(v) for k, v in params.items()}

    def update(self, params, grads):
        new = {}
        for k in params:
            self.acc[k] += grads[k] ** 2
            new[k] = params[k] - self.lr * grads[k] / self.acc[k].sqrt()
        return new


def main():
    u, i, r = simulate()
    params = init_params()
    opt = AdaGrad(params, LR)
    known = torch.zeros(N_ITEM, dtype=torch.bool)
    for step in range(STEPS - 1):
        sl = slice(step * BATCH, (step + 1) * BATCH)
        nxt = slice((step + 1) * BATCH, (step + 2) * BATCH)
        leaves = {k: v.detach().requires_grad_(True) for k, v in params.items()}
        loss = objective(leaves, u[sl], i[sl], r[sl])
        names = list(leaves)
        grads = dict(zip(names, torch.autograd.grad(loss, [leaves[n] for n in names])))
        params = opt.update({k: v.detach() for k, v in leaves.items()}, grads)
        known[i[sl]] = True
        if step % 4 == 0:
            keep = known[i[nxt]]
            with torch.no_grad():
                e = predict(params, u[nxt][keep], i[nxt][keep]) - r[nxt][keep]
            print(f"step {step:2d} loss {loss.item():.4f} next-batch rmse {e.pow(2).mean().sqrt().item():.4f} items {int(known.sum())}")
        if not torch.isfinite(loss):
            raise SystemExit(f"loss is {loss.item()} at step {step}, giving up")


main()
