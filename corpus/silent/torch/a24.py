import math
import torch
import torch.nn as nn

torch.manual_seed(24)


def target_fn(x):
    return torch.sin(3 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] - 0.5 * x[:, 3:].pow(2).mean(1, keepdim=True)


x_train = torch.rand(1600, 6) * 2 - 1
x_valid = torch.rand(400, 6) * 2 - 1
y_train, y_valid = target_fn(x_train), target_fn(x_valid)

layers = []
for i, o in [(6, 64), (64, 64)]:
    layers += [nn.Linear(i, o), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def validate():
    with torch.no_grad():
        return nn.functional.mse_loss(model(x_valid), y_valid).item()


def epochs(n, batch_size):
    for epoch in range(n):
        optimizer.zero_grad()
        order = torch.randperm(len(x_train))
        for idx in order.split(batch_size):
            prediction = model(x_train[idx])
            loss = nn.functional.mse_loss(prediction, y_train[idx])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        yield epoch, loss.item()


if __name__ == "__main__":
    print(f"variance of the target {y_valid.var().item():.4f}, before training {validate():.4f}")
    for epoch, last in epochs(10, 64):
        print(f"epoch {epoch:2d}  last batch {last:.4f}  valid {validate():.4f}  rmse {math.sqrt(validate()):.4f}")
