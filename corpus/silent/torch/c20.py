# Continue training of an already fitted linear model with a tiny learning rate.
import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

torch.manual_seed(0)
X, y = load_breast_cancer(return_X_y=True)
X = StandardScaler().fit_transform(X)
rng = np.random.RandomState(0).permutation(len(X))
X, y = X[rng], y[rng]
Xtr, ytr, Xte, yte = X[:420], y[:420], X[420:], y[420:]

sk = LogisticRegression(C=1.0, max_iter=1000).fit(Xtr, ytr)
print("sklearn acc", sk.score(Xte, yte))

clf = torch.nn.Linear(30, 1)
with torch.no_grad():
    clf.weight.copy_(torch.tensor(sk.coef_))
    clf.bias.copy_(torch.tensor(sk.intercept_))

xt, yt = torch.tensor(Xtr).float(), torch.tensor(ytr).float()
xv, yv = torch.tensor(Xte).float(), torch.tensor(yte).float()
lossf = torch.nn.BCEWithLogitsLoss()
# fitted model: only polish it
opt = torch.optim.Adam(clf.parameters(), lr=1e-5)
for epoch in range(20):
    perm = torch.randperm(len(xt))
    for b in perm.split(70):
        l = lossf(clf(xt[b]).squeeze(1), yt[b])
        opt.zero_grad(); l.backward(); opt.step()
    if epoch % 2 == 0:
        with torch.no_grad():
            print(f"epoch {epoch} full train loss {lossf(clf(xt).squeeze(1), yt).item():.6f}")
with torch.no_grad():
    out = clf(xv).squeeze(1)
    print("final metric: val loss %.4f val acc %.4f" % (lossf(out, yv), ((out > 0).float() == yv).float().mean()))
