import torch
import torch.nn as nn

torch.manual_seed(0)

# 1d blood flow in an elastic vessel:  A_t + (A u)_x = 0 ,  u_t + u u_x + p_x / rho = 0
RHO, K, A0 = 1.0, 0.6, 1.0


class MLP(nn.Module):
    def __init__(self, layers):
        super().__init__()
        mods = []
        for i in range(len(layers) - 2):
            lin = nn.Linear(layers[i], layers[i + 1])
            nn.init.xavier_normal_(lin.weight)
            mods += [lin, nn.Tanh()]
        mods.append(nn.Linear(layers[-2], layers[-1]))
        self.net = nn.Sequential(*mods)
        with torch.no_grad():
            self.net[-1].bias.copy_(torch.tensor([A0, 0.0]))

    def forward(self, x, t):
        return self.net(torch.cat([x, t], dim=1)).split(1, dim=1)


def d(out, inp):
    return torch.autograd.grad(out, inp, torch.ones_like(out), create_graph=True)[0]


class VesselPINN:
    def __init__(self, n_col=256, n_ic=128):
        self.model = MLP([2, 24, 24, 24, 2])
        self.opt = torch.optim.Adam(self.model.parameters(), lr=1.5e-2)
        self.n_col, self.n_ic = n_col, n_ic

    def pressure(self, A):
        return K * (torch.sqrt(A / A0) - 1.0)

    def residuals(self):
        x = (2 * torch.rand(self.n_col, 1) - 1).requires_grad_(True)
        t = (0.5 * torch.rand(self.n_col, 1)).requires_grad_(True)
        A, u = self.model(x, t)
        p = self.pressure(A)
        mass = d(A, t) + d(A * u, x)
        mom = d(u, t) + u * d(u, x) + d(p, x) / RHO
        return mass, mom

    def initial(self):
        x = 2 * torch.rand(self.n_ic, 1) - 1
        A, u = self.model(x, torch.zeros_like(x))
        A_init = A0 * (1 - 0.99 * torch.exp(-(x / 0.3) ** 2))
        return (A - A_init).pow(2).mean() + u.pow(2).mean()

    def boundary(self):
        t = 0.5 * torch.rand(32, 1)
        out = 0.0
        for side in (-1.0, 1.0):
            A, u = self.model(torch.full_like(t, side), t)
            out = out + (A - A0).pow(2).mean() + u.pow(2).mean()
        return out

    def train(self, n_steps):
        for it in range(n_steps):
            mass, mom = self.residuals()
            l_pde = mass.pow(2).mean() + mom.pow(2).mean()
            l_ic, l_bc = self.initial(), self.boundary()
            loss = 0.02 * l_pde + 10.0 * l_ic + l_bc
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            if it % 5 == 0:
                with torch.no_grad():
                    low = self.model(torch.linspace(-1, 1, 41)[:, None], torch.zeros(41, 1))[0].min()
                print(f"{it:3d} total {loss.item():.4f} pde {l_pde.item():.4f} ic {l_ic.item():.4f} "
                      f"bc {l_bc.item():.4f} narrowest {low.item():.3f}")


VesselPINN().train(50)
