# Restricted Boltzmann machine on the 8x8 digits, CD-k
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(11)
N_VIS, N_HID, K, BATCH = 64, 128, 2, 64


class RBM(nn.Module):
    def __init__(self, n_vis=N_VIS, n_hid=N_HID, k=K):
        super().__init__()
        self.W = nn.Parameter(torch.randn(n_hid, n_vis) * 1e-2)
        self.v_bias = nn.Parameter(torch.zeros(n_vis))
        self.h_bias = nn.Parameter(torch.zeros(n_hid))
        self.k = k

    def sample_from_p(self, p):
        return torch.bernoulli(p)

    def v_to_h(self, v):
        p_h = torch.sigmoid(F.linear(v, self.W, self.h_bias))
        return p_h, self.sample_from_p(p_h)

    def h_to_v(self, h):
        # visible units count grey levels 0..16
        p_v = torch.sigmoid(F.linear(h, self.W.t(), self.v_bias))
        return p_v, torch.distributions.Binomial(16, p_v).sample()

    def gibbs(self, v):
        with torch.no_grad():
            _, h = self.v_to_h(v)
            for _ in range(self.k):
                _, v_model = self.h_to_v(h)
                _, h = self.v_to_h(v_model)
        return v_model

    def free_energy(self, v):
        vbias_term = v.mv(self.v_bias)
        wx_b = F.linear(v, self.W, self.h_bias)
        hidden_term = wx_b.exp().add(1).log().sum(1)
        return (-hidden_term - vbias_term).mean()


def reconstruction_error(rbm, v):
    with torch.no_grad():
        p_h, h = rbm.v_to_h(v)
        p_v, _ = rbm.h_to_v(h)
    return ((16 * p_v - v) ** 2).mean().item()


def main():
    digits = load_digits()
    data = torch.tensor(digits.data, dtype=torch.float32)
    train, held = data[:1280], data[1280:]
    loader = DataLoader(TensorDataset(train), batch_size=BATCH, shuffle=True)
    rbm = RBM()
    opt = torch.optim.SGD(rbm.parameters(), lr=1e-2, momentum=0.9)

    step = 0
    for epoch in range(4):
        gaps = []
        for (v,) in loader:
            v_model = rbm.gibbs(v)
            loss = rbm.free_energy(v) - rbm.free_energy(v_model)
            opt.zero_grad()
            loss.backward()
            opt.step()
            gaps.append(loss.item())
            if step % 10 == 0:
                print(f"step {step:3d} free energy gap {loss.item():9.3f}")
            step += 1
        print(f"epoch {epoch} mean gap {sum(gaps) / len(gaps):.3f} "
              f"held out recon {reconstruction_error(rbm, held):.3f}")


if __name__ == "__main__":
    main()
