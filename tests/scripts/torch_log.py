"""The probability of a class rounds to 0 when the inputs have grown."""

import sys

import torch

assert __name__ == "__main__"
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(-1))
optimizer = torch.optim.Adam(model.parameters(), lr=float(sys.argv[1]))
for step in range(50):
    p = model(torch.randn(8, 4) * 10**step)
    loss = -torch.log(p[:, 0]).mean()  # BAD
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step + 1, loss.item() > 0)
