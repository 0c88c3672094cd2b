# sparse autoencoder on 8x8 digits
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from sklearn.datasets import load_digits

torch.manual_seed(11)
images = torch.tensor(load_digits().data, dtype=torch.float32) / 16.0
loader = DataLoader(TensorDataset(images), batch_size=128, shuffle=True)


class SparseAE(nn.Module):
    def __init__(self, n_in=64, n_code=128):
        super().__init__()
        self.enc = nn.Linear(n_in, n_code)
        self.dec = nn.Linear(n_code, n_in)

    def forward(self, x):
        code = torch.relu(self.enc(x))
        return self.dec(code), code


def train(model, epochs=18, lr=2e-3, l1=0.05):
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for epoch in range(epochs):
        total, n = 0.0, 0
        for (x,) in loader:
            recon, code = model(x)
            mse = ((recon - x) ** 2).mean()
            penalty = l1 * code.abs().sum(dim=1).mean()
            loss = mse + penalty
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += mse.item() * len(x)
            n += len(x)
        print(f"epoch {epoch:2d}  recon mse {total / n:.5f}  loss {loss.item():.5f}")


if __name__ == "__main__":
    net = SparseAE()
    train(net)
    with torch.no_grad():
        r, _ = net(images)
    print("variance explained:", round(1 - ((r - images) ** 2).sum().item() / ((images - images.mean(0)) ** 2).sum().item(), 4))
