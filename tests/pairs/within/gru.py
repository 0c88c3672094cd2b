"""Sequence regression: a GRU with a layer per gate, and with two matrices."""

import numpy as np
import torch
import torch.nn as nn

import stablenum_torch

N_IN, N_HID, N_OUT = 9, 16, 3
STEP_SIZE, BETA1, BETA2, ADAM_EPS = 1e-2, 0.9, 0.99, 1e-7


def sequences():
    rng = np.random.default_rng(404)
    x = rng.normal(size=(4, 8, N_IN)).astype(np.float32)
    lengths = np.array([8, 5, 7, 3])
    y = rng.normal(size=(4, N_OUT)).astype(np.float32)
    return x, lengths, y


class GRUCell(nn.Module):
    def __init__(self, n_in, n_hid):
        super().__init__()
        self.xr, self.hr = nn.Linear(n_in, n_hid), nn.Linear(n_hid, n_hid, bias=False)
        self.xz, self.hz = nn.Linear(n_in, n_hid), nn.Linear(n_hid, n_hid, bias=False)
        self.xn, self.hn = nn.Linear(n_in, n_hid), nn.Linear(n_hid, n_hid)

    def forward(self, x, h):
        r = torch.sigmoid(self.xr(x) + self.hr(h))
        z = torch.sigmoid(self.xz(x) + self.hz(h))
        n = torch.tanh(self.xn(x) + r * self.hn(h))
        return (1 - z) * n + z * h


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = GRUCell(N_IN, N_HID)
        self.readout = nn.Sequential(nn.Linear(N_HID, N_HID), nn.ELU(), nn.Linear(N_HID, N_OUT))

    def forward(self, x, lengths):
        h = x.new_zeros(x.shape[0], N_HID)
        for t in range(x.shape[1]):
            alive = (t < lengths).unsqueeze(1)
            h = torch.where(alive, self.cell(x[:, t], h), h)
        return self.readout(h)


def left():
    torch.manual_seed(50)
    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=STEP_SIZE, betas=(BETA1, BETA2), eps=ADAM_EPS)

    def loss_fn(x, lengths, y):
        return nn.functional.smooth_l1_loss(model(x, lengths), y, beta=0.5)

    batch = [torch.tensor(a) for a in sequences()]
    return stablenum_torch.program(loss_fn, *batch, model=model, optimizer=optimizer)


class FusedCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(N_IN, 3 * N_HID)
        self.recurrent = nn.Linear(N_HID, 2 * N_HID, bias=False)
        self.candidate = nn.Linear(N_HID, N_HID)

    def forward(self, projected, h):
        gates, new = projected.split([2 * N_HID, N_HID], dim=-1)
        reset, update = torch.sigmoid(gates + self.recurrent(h)).chunk(2, dim=-1)
        new = torch.tanh(new + reset * self.candidate(h))
        return new + update * (h - new)


class FusedRegressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = FusedCell()
        self.hidden = nn.Linear(N_HID, N_HID)
        self.output = nn.Linear(N_HID, N_OUT)

    def forward(self, x, lengths):
        projected = self.cell.inputs(x)
        state = torch.zeros(x.shape[0], N_HID, dtype=x.dtype)
        for t, step in enumerate(projected.unbind(1)):
            kept = (lengths > t).to(x.dtype).unsqueeze(-1)
            state = kept * self.cell(step, state) + (1 - kept) * state
        hidden = self.hidden(state)
        return self.output(nn.functional.elu(hidden))


def right():
    torch.manual_seed(51)
    net = FusedRegressor()
    adam = torch.optim.Adam(net.parameters(), lr=STEP_SIZE, betas=(BETA1, BETA2), eps=ADAM_EPS)

    def loss_fn(x, lengths, y):
        error = (net(x, lengths) - y).abs()
        linear = error - 0.25
        return torch.where(error < 0.5, error.square(), linear).mean()

    x, lengths, y = map(torch.tensor, sequences())
    return stablenum_torch.program(loss_fn, x, lengths, y, model=net, optimizer=adam)
