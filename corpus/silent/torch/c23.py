# Surrogate of a heat exchanger: outlet temperature in degrees Celsius, full-batch L-BFGS.
import torch

torch.manual_seed(6)
torch.set_default_dtype(torch.float64)

n = 256
flow = torch.rand(n, 1) * 2 - 1
inlet = torch.rand(n, 1) * 2 - 1
load = torch.rand(n, 1) * 2 - 1
X = torch.cat([flow, inlet, load], 1)
temp = 22 + 6 * torch.tanh(2 * load - flow) + 3 * inlet + 2 * torch.sin(3 * flow * inlet)
temp = temp + 0.1 * torch.randn(n, 1)

net = torch.nn.Sequential(torch.nn.Linear(3, 24), torch.nn.Tanh(), torch.nn.Linear(24, 24), torch.nn.Tanh(), torch.nn.Linear(24, 1))
opt = torch.optim.LBFGS(net.parameters(), lr=1.0, max_iter=10, history_size=20, line_search_fn="strong_wolfe")
tr, te = slice(0, 200), slice(200, None)


def closure():
    opt.zero_grad()
    loss = torch.nn.functional.mse_loss(net(X[tr]), temp[tr])
    loss.backward()
    return loss


for outer in range(30):
    l = opt.step(closure)
    if outer % 3 == 0:
        print(f"outer {outer:2d}  mse {l.item():.5f}")
with torch.no_grad():
    e = (net(X[te]) - temp[te]).pow(2).mean().sqrt()
print("final metric: test rmse %.4f degC, target std %.3f" % (e, temp.std()))
