"""Deep hedging of a European call under stochastic volatility (Euler paths, entropic risk)."""
import torch
import torch.nn as nn


class HestonMarket:
    def __init__(self, kappa=1.0, theta=0.30, sigma=1.2, rho=-0.7, s0=1.0, v0=0.30, n_steps=12, maturity=1.0, seed=5):
        self.kappa, self.theta, self.sigma, self.rho = kappa, theta, sigma, rho
        self.s0, self.v0 = s0, v0
        self.n_steps, self.dt = n_steps, maturity / n_steps
        self.gen = torch.Generator().manual_seed(seed)

    def simulate(self, n_paths):
        z = torch.randn(2, self.n_steps, n_paths, generator=self.gen)
        dw_v = z[0] * self.dt ** 0.5
        dw_s = (self.rho * z[0] + (1 - self.rho ** 2) ** 0.5 * z[1]) * self.dt ** 0.5
        s = torch.full((n_paths,), self.s0)
        v = torch.full((n_paths,), self.v0)
        spot, var = [s], [v]
        for k in range(self.n_steps):
            vol = v.clamp(min=0.0).sqrt()
            s = s + s * vol * dw_s[k]
            v = v + self.kappa * (self.theta - v) * self.dt + self.sigma * vol * dw_v[k]
            spot.append(s)
            var.append(v.clamp(min=0.0))
        return torch.stack(spot), torch.stack(var)


class HedgeNet(nn.Module):
    def __init__(self, n_in=4, width=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(n_in, width), nn.LayerNorm(width), nn.ReLU(),
            nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 1), nn.Sigmoid(),
        )

    def forward(self, feats):
        return self.net(feats).squeeze(-1)


class Hedger:
    def __init__(self, market, strike=1.0, cost=1e-3, risk_aversion=2.0):
        self.market, self.strike, self.cost, self.a = market, strike, cost, risk_aversion
        self.policy = HedgeNet()
        self.premium = nn.Parameter(torch.tensor(0.1))

    def features(self, k, spot, var, prev):
        tau = 1.0 - k / self.market.n_steps
        moneyness = torch.log(spot[k] / self.strike)
        return torch.stack([moneyness, var[k], torch.full_like(prev, tau), prev], dim=-1)

    def pnl(self, n_paths):
        spot, var = self.market.simulate(n_paths)
        hold = torch.zeros(n_paths)
        wealth = self.premium.expand(n_paths)
        for k in range(self.market.n_steps):
            new = self.policy(self.features(k, spot, var, hold))
            wealth = wealth + new * (spot[k + 1] - spot[k]) - self.cost * (new - hold).abs() * spot[k]
            hold = new
        payoff = (spot[-1] - self.strike).clamp(min=0.0)
        return wealth - payoff

    def risk(self, pnl):
        n = torch.tensor(float(pnl.numel()))
        return (torch.logsumexp(-self.a * (pnl - self.premium), 0) - n.log()) / self.a


def main():
    torch.manual_seed(0)
    hedger = Hedger(HestonMarket())
    opt = torch.optim.Adam(hedger.policy.parameters(), lr=2e-3)
    for epoch in range(60):
        pnl = hedger.pnl(256)
        loss = hedger.risk(pnl)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(hedger.policy.parameters(), 1.0)
        opt.step()
        if epoch % 5 == 0:
            print(f"epoch {epoch:2d} price {loss.item():.4f} pnl std {pnl.std().item():.4f}")
    with torch.no_grad():
        print("final indifference price", hedger.risk(hedger.pnl(1024)).item())


main()
