import math
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
LATENT, IMG, TXT, DIM = 16, 96, 120, 64


class ImageEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(IMG, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, DIM))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


class TextEncoder(nn.Module):
    def __init__(self, vocab=64):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, 64, mode="mean")
        self.net = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, DIM))

    def forward(self, x):
        return F.normalize(self.net(self.emb(x)), dim=-1)


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.text = ImageEncoder(), TextEncoder()
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, img, txt):
        return self.visual(img), self.text(txt), self.logit_scale.exp()


g = torch.Generator().manual_seed(8)
to_img = torch.randn(LATENT, IMG, generator=g) / math.sqrt(LATENT)
to_txt = torch.randn(LATENT, 64, generator=g) * 1.2


def make_pairs(n):
    z = torch.randn(n, LATENT, generator=g)
    img = torch.tanh(z @ to_img) + 0.02 * torch.randn(n, IMG, generator=g)
    txt = torch.multinomial(torch.softmax(z @ to_txt, -1), TXT, replacement=True, generator=g)
    return img, txt


train_img, train_txt = make_pairs(2048)
val_img, val_txt = make_pairs(500)
model = CLIP()
no_decay = [p for p in model.parameters() if p.ndim < 2 and p is not model.logit_scale]
decay = [p for p in model.parameters() if p.ndim >= 2]
optimizer = torch.optim.AdamW([
    {"params": decay, "weight_decay": 0.01},
    {"params": no_decay, "weight_decay": 0.0},
    {"params": [model.logit_scale], "weight_decay": 0.0, "lr": 2e-2},
], lr=2e-3, betas=(0.9, 0.98))

for step in range(400):
    idx = torch.randperm(len(train_img), generator=g)[:128]
    fi, ft, scale = model(train_img[idx], train_txt[idx])
    logits = scale * fi @ ft.T
    target = torch.arange(len(idx))
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, math.log(25))
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.4f} logit_scale {model.logit_scale.exp().item():.2f}")

model.eval()
with torch.no_grad():
    fi, ft, _ = model(val_img, val_txt)
    rank = (fi @ ft.T).topk(5, dim=-1).indices
    hit = (rank == torch.arange(len(fi))[:, None]).any(-1).float().mean().item()
print("FINAL", 1 - hit)
