"""Latent action model: infer a discrete action from (frame_t, frame_t+1), decode frame_t+1."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(5)
DIM, CODE, NUM, ACTIONS = 24, 8, 32, 6


class VectorQuantizer(nn.Module):
    def __init__(self, num_codes, code_dim):
        super().__init__()
        self.codebook = nn.Embedding(num_codes, code_dim)
        self.codebook.weight.data.normal_(0, 0.5)

    def forward(self, x):
        d = torch.cdist(x, self.codebook.weight)
        indices = d.argmin(dim=-1)
        z = self.codebook(indices)
        z_q = x + (z - x).detach()
        return z_q, z, x, indices


class LatentActionModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(2 * DIM, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, CODE), nn.LayerNorm(CODE)
        )
        self.vq = VectorQuantizer(NUM, CODE)
        self.decoder = nn.Sequential(
            nn.Linear(DIM + CODE, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, DIM)
        )

    def encode(self, a, b):
        z_e = self.encoder(torch.cat([a, b], dim=-1))
        z_q, z, _, indices = self.vq(z_e)
        return {"z_e": z_e, "z_q": z_q, "z": z, "indices": indices}

    def forward(self, a, b):
        out = self.encode(a, b)
        out["recon"] = a + self.decoder(torch.cat([a, out["z_q"]], dim=-1))
        return out


MOVES = torch.randn(ACTIONS, DIM) * 1.2
MIX = torch.randn(DIM, DIM) / DIM ** 0.5


def make_pairs(n, gen):
    a = torch.randn(n, DIM, generator=gen)
    k = torch.randint(0, ACTIONS, (n,), generator=gen)
    b = a + MOVES[k] + 0.2 * torch.tanh(a @ MIX)
    return a, b + 0.02 * torch.randn(n, DIM, generator=gen)


gen = torch.Generator().manual_seed(0)
train_a, train_b = make_pairs(8192, gen)
val_a, val_b = make_pairs(1024, gen)

model = LatentActionModel()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
beta = 0.25

for step in range(400):
    idx = torch.randint(0, len(train_a), (256,), generator=gen)
    a, b = train_a[idx], train_b[idx]
    out = model(a, b)
    recon_loss = F.mse_loss(out["recon"], b)
    codebook_loss = F.mse_loss(out["z"], out["z_e"].detach())
    commit_loss = F.mse_loss(out["z_e"], out["z"].detach())
    loss = recon_loss + codebook_loss + beta * commit_loss
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 50 == 0:
        used = out["indices"].unique().numel()
        print(f"step {step} loss {loss.item():.4f} recon {recon_loss.item():.4f} used {used}")

with torch.no_grad():
    out = model(val_a, val_b)
    code = model.vq.codebook(out["indices"])
    recon = val_a + model.decoder(torch.cat([val_a, code], dim=-1))
    final = F.mse_loss(recon, val_b).item()
print("codes used on validation:", out["indices"].unique().numel())
print("FINAL", final)
