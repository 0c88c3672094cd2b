"""Speech-like denoiser with a complex ratio mask, trained on power-law compressed spectra."""
import math
import torch
from torch import nn

torch.manual_seed(5)
SR, N_FFT, HOP = 4000, 128, 64
POWER = 0.3


def make_clip(n=4096):
    """A chirping tone, with the tail of the clip padded to a common length."""
    t = torch.arange(n) / SR
    f0 = 200 + 400 * torch.rand(1)
    clean = torch.sin(2 * math.pi * (f0 * t + 80 * t * t))
    noisy = clean + 0.3 * torch.randn(n)
    length = int(torch.randint(2200, 3300, (1,)))
    clean[length:] = 0.0
    noisy[length:] = 0.0
    return clean, noisy


def stft(batch):
    window = torch.hann_window(N_FFT)
    return torch.stft(batch, N_FFT, HOP, window=window, return_complex=True)


class MaskNet(nn.Module):
    def __init__(self, bins=N_FFT // 2 + 1):
        super().__init__()
        self.rnn = nn.GRU(bins, 48, batch_first=True)
        self.re = nn.Linear(48, bins)
        self.im = nn.Linear(48, bins)

    def forward(self, spec):
        feats = torch.log1p(spec.abs()).transpose(1, 2)
        h, _ = self.rnn(feats)
        return self.re(h).transpose(1, 2), self.im(h).transpose(1, 2)


net = MaskNet()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for it in range(60):
    clips = [make_clip() for _ in range(8)]
    clean = stft(torch.stack([c for c, _ in clips]))
    noisy = stft(torch.stack([n for _, n in clips]))
    m_re, m_im = net(noisy)
    est_re = m_re * noisy.real - m_im * noisy.imag
    est_im = m_re * noisy.imag + m_im * noisy.real

    complex_term = ((est_re - clean.real) ** 2 + (est_im - clean.imag) ** 2).mean()
    est_compressed = (est_re ** 2 + est_im ** 2) ** (POWER / 2)
    loss = (est_compressed - clean.abs() ** POWER).pow(2).mean() + 0.1 * complex_term

    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    if it % 5 == 0:
        print(it, round(loss.item(), 5), round(complex_term.item(), 5))
