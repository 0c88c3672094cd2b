# non-saturating GAN with an R1 penalty on a 2-D toy: points on a tilted ellipse
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(5)

ZDIM, BATCH, STEPS = 8, 128, 300

def real(n):
    e = torch.randn(n, 2)
    A = torch.tensor([[0.9, 0.3], [0.0, 0.4]])
    return e @ A + torch.tensor([1.0, -0.5])

def mlp(i, o, act):
    return nn.Sequential(nn.Linear(i, 48), act, nn.Linear(48, 48), act, nn.Linear(48, o))

G = mlp(ZDIM, 2, nn.ReLU())
D = mlp(2, 1, nn.LeakyReLU(0.2))
og = torch.optim.Adam(G.parameters(), lr=5e-4, betas=(0.5, 0.99))
od = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.99))
bce = F.binary_cross_entropy_with_logits
one, zero = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)

def quality(n=4000):
    with torch.no_grad():
        f, r = G(torch.randn(n, ZDIM)), real(n)
    return (f.mean(0) - r.mean(0)).norm().item(), (f.T.cov() - r.T.cov()).norm().item()

print("before: mean gap %.3f cov gap %.3f" % quality())
for t in range(STEPS):
    x = real(BATCH).requires_grad_()
    fake = G(torch.randn(BATCH, ZDIM)).detach()
    dr = D(x)
    gx, = torch.autograd.grad(dr.sum(), x, create_graph=True)
    ld = bce(dr, one) + bce(D(fake), zero) + 0.5 * gx.pow(2).sum(1).mean()
    od.zero_grad(); ld.backward(); od.step()

    lg = bce(D(G(torch.randn(BATCH, ZDIM))), one)
    og.zero_grad(); lg.backward(); og.step()
    if t % 30 == 0:
        print(f"{t:4d} D {ld.item():.3f} G {lg.item():.3f}  mean gap {quality()[0]:.3f}")
print("final metric: mean gap %.3f cov gap %.3f" % quality())
