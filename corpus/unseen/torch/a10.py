# fine-tune a small regressor entirely in half precision
import torch
import torch.nn as nn


def build(n_in, n_hidden, n_out):
    net = nn.Sequential(
        nn.Linear(n_in, n_hidden),
        nn.GELU(),
        nn.LayerNorm(n_hidden),
        nn.Linear(n_hidden, n_out),
    )
    return net.half()


def make_data(n=512, n_in=20, seed=0):
    gen = torch.Generator().manual_seed(seed)
    X = torch.randn(n, n_in, generator=gen)
    W = torch.randn(n_in, 3, generator=gen) / n_in ** 0.5
    y = torch.tanh(X @ W) + 0.05 * torch.randn(n, 3, generator=gen)
    return X.half(), y.half()


@torch.no_grad()
def evaluate(net, X, y):
    net.eval()
    err = (net(X).float() - y.float()).abs().mean().item()
    net.train()
    return err


def finetune(net, X, y, steps=60, bs=64):
    opt = torch.optim.Adam(net.parameters(), lr=1e-4)
    losses = []
    for step in range(steps):
        idx = torch.randint(0, len(X), (bs,))
        pred = net(X[idx])
        loss = nn.functional.smooth_l1_loss(pred.float(), y[idx].float())
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print("step", step, "loss", round(losses[-1], 4), "mae", evaluate(net, X, y))
    return losses


if __name__ == "__main__":
    torch.manual_seed(0)
    X, y = make_data()
    net = build(20, 64, 3)
    losses = finetune(net, X, y)
    weights_ok = all(p.isfinite().all() for p in net.parameters())
    print("last loss", losses[-1], "weights finite:", weights_ok)
    torch.save({k: v.clone() for k, v in net.state_dict().items()}, __import__("io").BytesIO())
