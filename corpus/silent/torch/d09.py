import torch
import torch.nn as nn


def ring(n, modes=8, radius=1.0, noise=0.2):
    k = torch.randint(0, modes, (n,)).float()
    ang = k * (2 * torch.pi / modes)
    return torch.stack([radius * ang.cos(), radius * ang.sin()], 1) + noise * torch.randn(n, 2) + 2.0


def mlp(sizes, act):
    out = []
    for a, b in zip(sizes[:-2], sizes[1:-1]):
        out += [nn.Linear(a, b), act()]
    out.append(nn.Linear(sizes[-2], sizes[-1]))
    return nn.Sequential(*out)


class AdversarialTrainer:
    def __init__(self, z_dim=8, lr=1e-3, batch=128):
        self.z_dim, self.batch = z_dim, batch
        self.G = mlp([z_dim, 64, 64, 2], nn.ReLU)
        self.D = mlp([2, 64, 64, 1], lambda: nn.LeakyReLU(0.2))
        self.opt_g = torch.optim.Adam(self.G.parameters(), lr=lr, betas=(0.5, 0.999))
        self.opt_d = torch.optim.Adam(self.D.parameters(), lr=lr, betas=(0.5, 0.999))
        self.bce = nn.BCEWithLogitsLoss()

    def generate(self, n):
        return self.G(torch.randn(n, self.z_dim))

    def score(self, real, fake):
        fake = fake.detach()
        return self.D(real), self.D(fake)

    def critic_step(self, real):
        r, f = self.score(real, self.generate(len(real)))
        loss = self.bce(r, torch.ones_like(r)) + self.bce(f, torch.zeros_like(f))
        self.opt_d.zero_grad()
        loss.backward()
        self.opt_d.step()
        return loss.item()

    def generator_step(self, real):
        _, f = self.score(real, self.generate(len(real)))
        loss = self.bce(f, torch.ones_like(f))
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()
        return loss.item()

    def fit(self, steps):
        for step in range(steps):
            real = ring(self.batch)
            d = self.critic_step(real)
            g = self.generator_step(real)
            if step % 40 == 0 or step == steps - 1:
                print(f"step {step:4d}  D {d:.3f}  G {g:.3f}")


def main():
    torch.manual_seed(4)
    t = AdversarialTrainer()
    t.fit(400)
    with torch.no_grad():
        s, r = t.generate(2000), ring(2000)
        near = torch.cdist(s, r).min(1).values.mean().item()
    print("mean of samples", s.mean(0).tolist(), "mean of data", r.mean(0).tolist())
    print(f"FINAL distance of samples to data {near:.3f}")


if __name__ == "__main__":
    main()
