import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(1)
VOCAB, CTX, D = 32, 24, 48


class LoRALinear(nn.Module):
    def __init__(self, base, r=8, alpha=16):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scaling = alpha / r

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q_proj, self.k_proj = nn.Linear(D, D), nn.Linear(D, D)
        self.v_proj, self.o_proj = nn.Linear(D, D), nn.Linear(D, D)
        self.up_proj, self.down_proj = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        h = self.ln1(x)
        split = lambda t: t.unflatten(-1, (4, D // 4)).transpose(1, 2)
        a = F.scaled_dot_product_attention(split(self.q_proj(h)), split(self.k_proj(h)),
                                           split(self.v_proj(h)), is_causal=True)
        x = x + self.o_proj(a.transpose(1, 2).flatten(2))
        return x + self.down_proj(F.gelu(self.up_proj(self.ln2(x))))


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, D)
        self.embed_pos = nn.Embedding(CTX, D)
        self.layers = nn.ModuleList([DecoderLayer() for _ in range(2)])
        self.norm = nn.LayerNorm(D)
        self.lm_head = nn.Linear(D, VOCAB)
        self.gradient_checkpointing = False

    def get_input_embeddings(self):
        return self.embed_tokens

    def forward(self, ids):
        x = self.embed_tokens(ids) + self.embed_pos.weight[: ids.shape[1]]
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(layer, x, use_reentrant=True)
            else:
                x = layer(x)
        return self.lm_head(self.norm(x))


def batch(n, lag, gen):
    seq = torch.randint(VOCAB, (n, 2), generator=gen)
    for t in range(2, CTX):
        nxt = (seq[:, t - lag] + 5) % VOCAB
        noise = torch.rand(n, generator=gen) < 0.1
        nxt = torch.where(noise, torch.randint(VOCAB, (n,), generator=gen), nxt)
        seq = torch.cat([seq, nxt[:, None]], 1)
    return seq


def lm_loss(model, seq):
    return F.cross_entropy(model(seq[:, :-1]).flatten(0, 1), seq[:, 1:].flatten())


gen = torch.Generator().manual_seed(2)
model = CausalLM()
opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(160):
    loss = lm_loss(model, batch(64, 1, gen))
    opt.zero_grad(); loss.backward(); opt.step()
print("pretrained, loss", round(loss.item(), 4))

for p in model.parameters():
    p.requires_grad_(False)
for layer in model.layers:
    for name in ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]:
        setattr(layer, name, LoRALinear(getattr(layer, name)))
model.lm_head.requires_grad_(True)
model.gradient_checkpointing = True
model.get_input_embeddings().register_forward_hook(lambda m, i, o: o.requires_grad_(True))

trainable = [p for p in model.parameters() if p.requires_grad]
print("trainable parameters", sum(p.numel() for p in trainable))
opt = torch.optim.AdamW(trainable, lr=4e-3)
valid = batch(256, 2, torch.Generator().manual_seed(77))
for step in range(200):
    model.train()
    loss = lm_loss(model, batch(64, 2, gen))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 40 == 0:
        print(f"lora step {step} loss {loss.item():.4f}")
model.eval()
with torch.no_grad():
    final = lm_loss(model, valid).item()
print("FINAL", final)
