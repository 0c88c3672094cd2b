import torch, torch.nn as nn, torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

torch.manual_seed(0)

X, y = load_digits(return_X_y=True)
Xtr, Xte, ytr, yte = train_test_split(X, y, test_size=0.25, random_state=0)
Xtr, Xte = (torch.tensor(a, dtype=torch.float32) for a in (Xtr, Xte))
ytr, yte = torch.tensor(ytr), torch.tensor(yte)


def accuracy(net):
    net.eval()
    with torch.no_grad():
        return (net(Xte).argmax(-1) == yte).float().mean().item()


# ------------------------------------------------------------------ teacher
teacher = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
topt = torch.optim.Adam(teacher.parameters(), lr=5e-3)
for ep in range(6):
    for idx in torch.randperm(len(Xtr)).split(64):
        l = F.cross_entropy(teacher(Xtr[idx]), ytr[idx])
        topt.zero_grad(); l.backward(); topt.step()
print("teacher acc %.3f" % accuracy(teacher))
teacher.requires_grad_(False).eval()

# ------------------------------------------------------------------ student
T = 0.1
ALPHA = 0.7


def distill_loss(s_logits, t_logits, target):
    t_logp = F.log_softmax(t_logits / T, dim=-1)
    s_prob = F.softmax(s_logits / T, dim=-1)
    soft = F.kl_div(t_logp, s_prob, reduction="batchmean") * T   # reverse KL, mode seeking
    hard = F.cross_entropy(s_logits, target)
    return ALPHA * soft + (1 - ALPHA) * hard


student = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
sopt = torch.optim.Adam(student.parameters(), lr=2e-3)
it = 0
for ep in range(3):
    for idx in torch.randperm(len(Xtr)).split(32):
        xb, yb = Xtr[idx], ytr[idx]
        loss = distill_loss(student(xb), teacher(xb), yb)
        sopt.zero_grad(); loss.backward(); sopt.step()
        if it % 5 == 0:
            print("ep %d it %d kd loss %.4f" % (ep, it, loss.item()))
        it += 1
    print("student acc %.3f" % accuracy(student))
