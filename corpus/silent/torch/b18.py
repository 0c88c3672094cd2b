"""A GRU cell has to report the one symbol of the sequence that carries a mark."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

SYMBOLS, LENGTH = 5, 10


def datasets(n=3000):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, SYMBOLS, (n, LENGTH), generator=g)
    at = torch.randint(0, LENGTH - 3, (n, 1), generator=g)
    mark = torch.zeros(n, LENGTH).scatter_(1, at, 1.0)
    x = torch.cat([nn.functional.one_hot(ids, SYMBOLS).float(), mark.unsqueeze(-1)], dim=-1)
    return random_split(TensorDataset(x, ids.gather(1, at).squeeze(1)), [2500, n - 2500], generator=g)


class MarkReader(nn.Module):
    def __init__(self, n_hidden=32):
        super().__init__()
        self.n_hidden = n_hidden
        self.cell = nn.GRUCell(SYMBOLS + 1, n_hidden)
        self.head = nn.Linear(n_hidden, SYMBOLS)

    def forward(self, seq):
        h = seq.new_zeros(len(seq), self.n_hidden)
        for token in seq.unbind(dim=1):
            h = h.detach()
            h = self.cell(token, h)
        return self.head(h)


def evaluate(model, loader):
    hits = total = 0
    with torch.no_grad():
        for x, y in loader:
            hits += (model(x).argmax(1) == y).sum().item()
            total += len(y)
    return hits / total


def main():
    torch.manual_seed(10)
    train, test = datasets()
    train_loader = DataLoader(train, batch_size=100, shuffle=True)
    test_loader = DataLoader(test, batch_size=500)
    model = MarkReader()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=4e-3)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(12):
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: last loss {loss.item():.4f}, test accuracy {evaluate(model, test_loader):.3f}")


if __name__ == "__main__":
    main()
