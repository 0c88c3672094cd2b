from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
import torch
import torch.nn as nn

torch.manual_seed(1)


def get_data():
    X, y = load_wine(return_X_y=True)
    X_tr, X_te, y_tr, y_te = train_test_split(X, y, test_size=0.3, random_state=1, stratify=y)
    mu, sd = X_tr.mean(0), X_tr.std(0)
    stats = {"mean": mu, "std": sd}
    as_t = lambda a: torch.as_tensor(a).float()
    return as_t(X_tr), as_t(X_te), torch.as_tensor(y_tr), torch.as_tensor(y_te), stats


class WineNet(nn.Module):
    def __init__(self):
        super(WineNet, self).__init__()
        self.fc1 = nn.Linear(13, 32)
        self.fc2 = nn.Linear(32, 16)
        self.fc3 = nn.Linear(16, 3)
        self.act = nn.Tanh()

    def forward(self, x):
        x = self.act(self.fc1(x))
        x = self.act(self.fc2(x))
        return self.fc3(x)


X_tr, X_te, y_tr, y_te, stats = get_data()
net = WineNet()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

for it in range(200):
    pick = torch.randperm(len(X_tr))[:32]
    optimizer.zero_grad()
    loss = criterion(net(X_tr[pick]), y_tr[pick])
    loss.backward()
    optimizer.step()
    if (it + 1) % 25 == 0:
        with torch.no_grad():
            acc = (net(X_te).argmax(1) == y_te).float().mean()
        print("iter %d  loss %.4f  test acc %.3f" % (it + 1, loss.item(), acc))

with torch.no_grad():
    print("final metric: test acc %.4f, train loss %.4f" % ((net(X_te).argmax(1) == y_te).float().mean(), criterion(net(X_tr), y_tr)))
