import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(7)


class Config:
    hidden_size = 24
    intermediate_size = 10
    num_experts = 6
    num_experts_per_tok = 1
    norm_topk_prob = False
    router_aux_loss_coef = 1e-2
    n_domains = 6
    n_classes = 8


class Expert(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up = nn.Linear(c.hidden_size, c.intermediate_size)
        self.down = nn.Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class MOEFeedForward(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.gate = nn.Linear(c.hidden_size, c.num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(c) for _ in range(c.num_experts)])
        self.aux_loss = 0.0

    def forward(self, x):
        c = self.config
        scores = F.softmax(self.gate(x), dim=-1)
        topk_weight, topk_idx = torch.topk(scores, k=c.num_experts_per_tok, dim=-1, sorted=False)
        if c.norm_topk_prob:
            topk_weight = topk_weight / (topk_weight.sum(dim=-1, keepdim=True) + 1e-20)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            tok, slot = (topk_idx == i).nonzero(as_tuple=True)
            if tok.numel():
                y = y.index_add(0, tok, expert(x[tok]) * topk_weight[tok, slot].unsqueeze(-1))
        load = F.one_hot(topk_idx, c.num_experts).float().mean(dim=(0, 1))
        self.aux_loss = c.router_aux_loss_coef * c.num_experts * (load * scores.mean(0)).sum()
        self.load = load.detach()
        return y


class Classifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.moe = MOEFeedForward(c)
        self.norm = nn.LayerNorm(c.hidden_size)
        self.head = nn.Linear(c.hidden_size, c.n_classes)

    def forward(self, x):
        return self.head(self.norm(self.moe(x)))


cfg = Config()
g = torch.Generator().manual_seed(3)
centers = torch.randn(cfg.n_domains, cfg.hidden_size, generator=g) * 1.2
teachers = torch.randn(cfg.n_domains, cfg.hidden_size, cfg.n_classes, generator=g)


def get_batch(n, gen):
    d = torch.randint(cfg.n_domains, (n,), generator=gen)
    z = torch.randn(n, cfg.hidden_size, generator=gen)
    label = torch.einsum("nh,nhc->nc", z, teachers[d]).argmax(-1)
    return centers[d] + z, label


train_gen = torch.Generator().manual_seed(11)
xv, yv = get_batch(4000, torch.Generator().manual_seed(99))
model = Classifier(cfg)
opt = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.01)
for step in range(400):
    x, y = get_batch(512, train_gen)
    ce = F.cross_entropy(model(x), y)
    loss = ce + model.moe.aux_loss
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 50 == 0:
        print(f"step {step} ce {ce.item():.4f} aux {float(model.moe.aux_loss):.5f} load {model.moe.load.numpy().round(2)}")

model.eval()
with torch.no_grad():
    val = F.cross_entropy(model(xv), yv).item()
print("FINAL", val)
