"""Fit mass, scale radius and centre of an NFW halo to a convergence map."""
import torch


def nfw_f(x):
    """F(x) of the projected NFW profile (Wright & Brainerd)."""
    inner = torch.acosh(1.0 / x) / torch.sqrt(1.0 - x ** 2)
    outer = torch.acos(1.0 / x) / torch.sqrt(x ** 2 - 1.0)
    return torch.where(x < 1.0, inner, outer)


def kappa(x, ks):
    return 2.0 * ks * (1.0 - nfw_f(x)) / (x ** 2 - 1.0)


class Halo(torch.nn.Module):
    def __init__(self, log_ks, log_rs, x0, y0):
        super().__init__()
        self.log_ks = torch.nn.Parameter(torch.tensor(log_ks))
        self.log_rs = torch.nn.Parameter(torch.tensor(log_rs))
        self.centre = torch.nn.Parameter(torch.tensor([x0, y0]))

    def forward(self, gx, gy):
        dx, dy = gx - self.centre[0], gy - self.centre[1]
        r = torch.sqrt(dx ** 2 + dy ** 2 + 1e-6)
        return kappa(r / self.log_rs.exp(), self.log_ks.exp())


def grid(n=24, half=2.0):
    ax = torch.linspace(-half, half, n, dtype=torch.float64)
    return torch.meshgrid(ax, ax, indexing="xy")


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    gx, gy = grid()
    with torch.no_grad():
        truth = Halo(-1.0, -0.2, 0.11, -0.07)
        obs = truth(gx, gy)
        obs = obs + 0.01 * torch.randn_like(obs)
    halo = Halo(-1.5, 0.2, 0.01, 0.02)
    opt = torch.optim.Adam(halo.parameters(), lr=0.03)
    for it in range(80):
        model = halo(gx, gy)
        chi2 = ((model - obs) ** 2).mean() / 0.01 ** 2
        prior = 0.5 * (halo.log_ks + 1.0) ** 2 + 0.5 * halo.log_rs ** 2
        loss = chi2 + 1e-3 * prior
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 10 == 0:
            print(f"{it:3d} chi2 {chi2.item():10.3f} ks {halo.log_ks.exp().item():.3f} "
                  f"rs {halo.log_rs.exp().item():.3f} centre {halo.centre.tolist()}")
