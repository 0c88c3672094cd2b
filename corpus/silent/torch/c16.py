# Copy-first-symbol task: the class shown at t=0 has to be named after 50 distractor steps.
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
T, K, NOISE, HIDDEN = 50, 4, 2, 64


def get_batch(bs):
    label = torch.randint(0, K, (bs,))
    seq = torch.randint(K, K + NOISE, (bs, T))
    seq[:, 0] = label
    return F.one_hot(seq, K + NOISE).float(), label


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(K + NOISE, HIDDEN, nonlinearity="tanh", batch_first=True)
        self.readout = nn.Linear(HIDDEN, K)
        self.reset()

    def reset(self):
        nn.init.normal_(self.rnn.weight_ih_l0, std=0.05)
        nn.init.orthogonal_(self.rnn.weight_hh_l0, gain=0.7)
        nn.init.zeros_(self.rnn.bias_ih_l0)
        nn.init.zeros_(self.rnn.bias_hh_l0)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.readout(out[:, -1])


net = Memory()
opt = torch.optim.RMSprop(net.parameters(), lr=1e-3)
acc_avg = 1 / K
for it in range(300):
    x, y = get_batch(64)
    logits = net(x)
    loss = F.cross_entropy(logits, y)
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    acc_avg = 0.95 * acc_avg + 0.05 * (logits.argmax(1) == y).float().mean().item()
    if it % 30 == 0:
        print(f"it {it:3d} loss {loss.item():.4f} acc {acc_avg:.3f}")
print(f"final metric: loss {loss.item():.4f} acc {acc_avg:.3f}")
