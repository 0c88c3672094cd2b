from dataclasses import dataclass
import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Cfg:
    vocab: int = 20
    length: int = 24
    dim: int = 64
    layers: int = 2
    heads: int = 4
    steps: int = 400
    batch: int = 64
    lr: float = 2e-3
    mask_rate: float = 0.15


class MaskedModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c.vocab + 1, c.dim)
        self.pos = nn.Embedding(c.length, c.dim)
        nn.init.normal_(self.tok.weight, std=0.02)
        nn.init.normal_(self.pos.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(c.dim, c.heads, 2 * c.dim, dropout=0.0,
                                           activation="gelu", batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, c.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(c.dim)
        self.bias = nn.Parameter(torch.zeros(c.vocab + 1))

    def forward(self, ids):
        h = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        return F.linear(self.norm(self.enc(h)), self.tok.weight, self.bias)


def sequences(c, n):
    start = torch.randint(0, c.vocab, (n, 1))
    stride = torch.randint(1, 4, (n, 1))
    return (start + stride * torch.arange(c.length)) % c.vocab


def corrupt(c, ids):
    pick = torch.rand(ids.shape) < c.mask_rate
    pick[:, 0] |= ~pick.any(1)
    inp = ids.masked_fill(pick, c.vocab)
    return inp, ids.masked_fill(~pick, -100)


def main():
    c = Cfg()
    torch.manual_seed(0)
    model = MaskedModel(c)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05},
                             {"params": rest, "weight_decay": 0.0}], lr=c.lr)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, s / 50))
    for step in range(c.steps):
        inp, labels = corrupt(c, sequences(c, c.batch))
        logits = model(inp)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        if step % 50 == 0 or step == c.steps - 1:
            hit = (logits.argmax(-1) == labels)[labels != -100].float().mean().item()
            print(f"step {step:3d} loss {loss.item():.4f} masked acc {hit:.3f}")


if __name__ == "__main__":
    main()
