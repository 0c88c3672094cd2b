import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, LENGTH, MASK = 20, 24, 20
torch.manual_seed(5)


def sequences(n):
    start = torch.randint(0, VOCAB, (n, 1))
    stride = torch.randint(1, 4, (n, 1))
    return (start + stride * torch.arange(LENGTH)) % VOCAB


def corrupt(ids, p=0.15):
    hide = torch.rand(ids.shape) < p
    labels = torch.where(hide, ids, torch.full_like(ids, -100))
    return ids.masked_fill(hide, MASK), labels


class MaskedLM(nn.Module):
    def __init__(self, dim=64, heads=4, depth=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB + 1, dim)
        self.pos = nn.Embedding(LENGTH, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.decoder = nn.Linear(dim, VOCAB + 1)
        self.decoder.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.05)
        nn.init.normal_(self.pos.weight, std=0.05)

    def forward(self, ids):
        h = self.embed(ids) + self.pos.weight
        return self.decoder(self.norm(self.encoder(h)))


model = MaskedLM()
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
sched = torch.optim.lr_scheduler.CyclicLR(
    opt, base_lr=1e-4, max_lr=3e-3, step_size_up=50, mode="triangular", cycle_momentum=False
)
for step in range(300):
    ids, labels = corrupt(sequences(32))
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    opt.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    if step % 40 == 0:
        print(f"{step:4d} lr {sched.get_last_lr()[0]:.2e} loss {loss.item():.4f}")

model.eval()
with torch.no_grad():
    ids, labels = corrupt(sequences(400))
    pred = model(ids).argmax(-1)
    hidden = labels != -100
    print(f"masked accuracy {(pred[hidden] == labels[hidden]).float().mean().item():.3f}")
