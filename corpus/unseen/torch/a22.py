"""Two-compartment pharmacokinetics: fit a bi-exponential curve with L-BFGS."""
import torch


def concentration(params, t):
    A, alpha, B, beta = params
    return A * torch.exp(-alpha * t) + B * torch.exp(-beta * t)


def simulate():
    g = torch.Generator().manual_seed(9)
    t = torch.tensor([0.1, 0.25, 0.5, 1, 2, 4, 6, 8, 12, 16, 24, 36, 48])
    c = concentration((80.0, 1.1, 22.0, 0.08), t)
    return t, c * (1 + 0.03 * torch.randn(len(t), generator=g))


def fit(t, c, guess, max_steps=15):
    params = torch.tensor(guess, requires_grad=True)
    optimizer = torch.optim.LBFGS([params], max_iter=10, history_size=6)
    history = []

    def closure():
        optimizer.zero_grad()
        residual = concentration(params, t) - c
        loss = (residual ** 2).mean()
        loss.backward()
        history.append(loss.item())
        return loss

    for step in range(max_steps):
        loss = optimizer.step(closure)
        A, alpha, B, beta = params.tolist()
        print(f"step {step:2d} loss {loss.item():.5g}  A={A:.3g} alpha={alpha:.3g} B={B:.3g} beta={beta:.3g}")
    return params.detach(), history


def half_lives(params):
    return torch.log(torch.tensor(2.0)) / params[[1, 3]]


if __name__ == "__main__":
    t, c = simulate()
    best, history = fit(t, c, guess=[50.0, 0.5, 30.0, 0.2])
    print("evaluations:", len(history))
    print("half-lives (h):", half_lives(best).tolist())
    pred = concentration(best, t)
    ss = ((c - pred) ** 2).sum() / ((c - c.mean()) ** 2).sum()
    print("R2:", 1 - ss.item())
