import torch
from torch import nn

torch.manual_seed(0)
VOCAB, LENGTH, HIDDEN = 400, 14, 64


class RewardModel(nn.Module):
    """Scores a response; embedding + gated mean pooling + value head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.gate = nn.Linear(HIDDEN, HIDDEN)
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.score = nn.Linear(HIDDEN, 1)

    def forward(self, input_ids):
        h = self.embedding(input_ids)
        h = torch.tanh(self.dense(h)) * torch.sigmoid(self.gate(h))
        return self.score(h.mean(1)).squeeze(-1)


token_quality = torch.randn(VOCAB)


def sample_pairs(n):
    a = torch.randint(VOCAB, (n, LENGTH))
    b = torch.randint(VOCAB, (n, LENGTH))
    better = token_quality[a].sum(1) > token_quality[b].sum(1)
    chosen = torch.where(better[:, None], a, b)
    rejected = torch.where(better[:, None], b, a)
    return chosen, rejected


train_chosen, train_rejected = sample_pairs(8000)
test_chosen, test_rejected = sample_pairs(1000)

model = RewardModel().to(torch.float16)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.99), eps=1e-4)

for step in range(300):
    idx = torch.randint(len(train_chosen), (64,))
    reward_chosen = model(train_chosen[idx])
    reward_rejected = model(train_rejected[idx])
    loss = -nn.functional.logsigmoid((reward_chosen - reward_rejected).float()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        acc = (reward_chosen > reward_rejected).float().mean().item()
        print(f"step {step} loss {loss.item():.4f} acc {acc:.3f}")

model.eval()
with torch.no_grad():
    margin = (model(test_chosen) - model(test_rejected)).float()
    print("test accuracy", (margin > 0).float().mean().item())
    print("FINAL", -nn.functional.logsigmoid(margin).mean().item())
