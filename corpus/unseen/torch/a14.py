# house prices with a linear model, plain loop
import numpy as np
import torch

rng = np.random.default_rng(1)
torch.manual_seed(1)

n = 400
sqm = rng.uniform(35, 240, n)
rooms = np.clip(np.round(sqm / 28 + rng.normal(0, 0.8, n)), 1, 9)
year = rng.integers(1900, 2021, n)
dist = rng.gamma(2.0, 3.0, n)
price = 40 + 2.1 * sqm + 9 * rooms + 0.35 * (year - 1900) - 4 * dist + rng.normal(0, 12, n)

X = torch.tensor(np.column_stack([sqm, rooms, year, dist]), dtype=torch.float32)
y = torch.tensor(price, dtype=torch.float32).unsqueeze(1)
cut = int(0.8 * n)
X_train, y_train, X_test, y_test = X[:cut], y[:cut], X[cut:], y[cut:]

model = torch.nn.Linear(4, 1)
loss_fn = torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

epochs = 50
for epoch in range(epochs):
    model.train()
    y_pred = model(X_train)
    loss = loss_fn(y_pred, y_train)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

    model.eval()
    with torch.inference_mode():
        test_loss = loss_fn(model(X_test), y_test)
    if epoch % 5 == 0:
        print(f"Epoch: {epoch} | Train loss: {loss:.4g} | Test loss: {test_loss:.4g}")

print("weights:", model.weight.data, "bias:", model.bias.data)
