import torch
import torch.nn as nn

torch.manual_seed(42)
V, T, D = 16, 12, 64


def batch(n=64):
    """Sort a sequence of tokens: the answer at place i is the i-th smallest."""
    x = torch.randint(0, V, (n, T))
    return x, x.sort(dim=1).values


class Sorter(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(V, D)
        self.pos = nn.Parameter(torch.randn(1, T, D) * 0.1)
        layer = nn.TransformerEncoderLayer(D, 4, 128, dropout=0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(D, V)

    def forward(self, x):
        return self.head(self.enc(self.tok(x) + self.pos))


config = dict(lr=0.03, betas=(0.9, 0.98), steps=220)

model = Sorter()
optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"], betas=config["betas"])
criterion = nn.CrossEntropyLoss()

model.train()
running = 0.0
for step in range(1, config["steps"] + 1):
    x, y = batch()
    optimizer.zero_grad()
    logits = model(x)
    loss = criterion(logits.flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    running += loss.item()
    if step % 20 == 0:
        print(f"[{step}] mean loss {running / 20:.4f}")
        running = 0.0

model.eval()
with torch.no_grad():
    x, y = batch(256)
    print("token accuracy", (model(x).argmax(-1) == y).float().mean().item())
