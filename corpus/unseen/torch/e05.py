# char level GRU on a small text, trained with a rectified Adam written from the paper
import math
import torch
import torch.nn as nn

TEXT = ("the rain in spain stays mainly in the plain and the quick brown fox jumps over the lazy dog "
        "while the early bird catches the worm and a stitch in time saves nine because all that glitters "
        "is not gold and every cloud has a silver lining so look before you leap ") * 3


class RAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            rho_inf = 2.0 / (1.0 - b2) - 1.0
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["t"] = torch.zeros(())
                    st["m"] = torch.zeros_like(p)
                    st["v"] = torch.zeros_like(p)
                st["t"] += 1
                t = st["t"]
                st["m"].mul_(b1).add_(p.grad, alpha=1 - b1)
                st["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                m_hat = st["m"] / (1 - b1 ** t)
                v_hat = (st["v"] / (1 - b2 ** t)).sqrt()
                rho = rho_inf - 2 * t * b2 ** t / (1 - b2 ** t)
                if t > 1:
                    rect = torch.sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))
                    p.sub_(group["lr"] * rect * m_hat / (v_hat + group["eps"]))
                else:
                    p.sub_(group["lr"] * m_hat)


class CharModel(nn.Module):
    def __init__(self, vocab, dim=48, hidden=96):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, hidden, batch_first=True)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, x, h=None):
        y, h = self.rnn(self.emb(x), h)
        return self.out(y), h


def batches(ids, bs=8, seq=24):
    while True:
        start = torch.randint(0, len(ids) - seq - 1, (bs,))
        x = torch.stack([ids[s:s + seq] for s in start])
        y = torch.stack([ids[s + 1:s + seq + 1] for s in start])
        yield x, y


@torch.no_grad()
def sample(model, stoi, itos, n=30):
    out, h = "t", None
    for _ in range(n):
        logits, h = model(torch.tensor([[stoi[out[-1]]]]), h)
        out += itos[logits[0, -1].argmax().item()]
    return out


if __name__ == "__main__":
    torch.manual_seed(42)
    chars = sorted(set(TEXT))
    stoi = {c: i for i, c in enumerate(chars)}
    itos = {i: c for c, i in stoi.items()}
    ids = torch.tensor([stoi[c] for c in TEXT])
    model = CharModel(len(chars))
    opt = RAdam(model.parameters(), lr=3e-3)
    lossf = nn.CrossEntropyLoss()
    for it, (x, y) in zip(range(50), batches(ids)):
        logits, _ = model(x)
        loss = lossf(logits.flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 5 == 0:
            print(f"it {it:3d} loss {loss.item():.4f} ppl {math.exp(loss.item()):.2f} | {sample(model, stoi, itos)!r}")
