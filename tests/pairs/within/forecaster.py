"""Forecasting with truncated backpropagation: torch's LSTM, and a cell written out."""

import numpy as np
import torch
from torch import nn

import stablenum_torch

CHANNELS = 12
HIDDEN = 12
CHUNK = 4
LR = 0.1
MAX_NORM = 0.05


def make_series(batch=5, steps=12):
    rng = np.random.default_rng(31)
    walk = rng.normal(size=(batch, steps + 1, CHANNELS)).cumsum(axis=1)
    walk = walk * rng.uniform(0.5, 2.0, size=(batch, 1, CHANNELS)) + rng.normal(size=(batch, 1, CHANNELS))
    return walk.astype(np.float32)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.basis = nn.Parameter(torch.randn(HIDDEN, CHANNELS) / CHANNELS**0.5)
        self.in_bias = nn.Parameter(0.1 * torch.randn(HIDDEN))
        self.rnn = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
        self.out_bias = nn.Parameter(0.1 * torch.randn(CHANNELS))

    def forward(self, series):
        z = torch.tanh(nn.functional.linear(series, self.basis, self.in_bias))
        state, outputs = None, []
        for chunk in z.split(CHUNK, dim=1):
            if state is not None:
                state = tuple(s.detach() for s in state)
            hidden, state = self.rnn(chunk, state)
            outputs.append(hidden)
        hidden = torch.cat(outputs, dim=1)
        return hidden @ self.basis + self.out_bias


def left():
    torch.manual_seed(17)
    model = Forecaster()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)

    def clip(*_):
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    optimizer.register_step_pre_hook(clip)

    def loss_fn(series):
        past, future = series[:, :-1], series[:, 1:]
        mean = past.mean(dim=1, keepdim=True)
        std = past.std(dim=1, keepdim=True)
        forecast = model((past - mean) / std)
        return nn.functional.mse_loss(forecast, (future - mean) / std)

    return stablenum_torch.program(loss_fn, torch.from_numpy(make_series()), model=model, optimizer=optimizer)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.recurrent = nn.Linear(HIDDEN, 4 * HIDDEN)

    def forward(self, x, hidden, memory):
        gates = self.inputs(x) + self.recurrent(hidden)
        enter, forget, new, leave = gates.chunk(4, dim=-1)
        memory = forget.sigmoid() * memory + enter.sigmoid() * new.tanh()
        return leave.sigmoid() * memory.tanh(), memory


class CellForecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.basis = nn.Parameter(torch.zeros(HIDDEN, CHANNELS))
        self.shift_in = nn.Parameter(torch.zeros(HIDDEN))
        self.cell = Cell()
        self.shift_out = nn.Parameter(torch.zeros(CHANNELS))

    def forward(self, series):
        projected = torch.tanh(series @ self.basis.T + self.shift_in)
        hidden = memory = torch.zeros(series.shape[0], HIDDEN, dtype=series.dtype)
        outputs = []
        for t in range(series.shape[1]):
            if t % CHUNK == 0:
                hidden, memory = hidden.detach(), memory.detach()
            hidden, memory = self.cell(projected[:, t], hidden, memory)
            outputs.append(hidden @ self.basis)
        return torch.stack(outputs, dim=1) + self.shift_out


def right():
    torch.manual_seed(18)
    net = CellForecaster()
    sgd = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)

    def limit(*_):
        nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)

    sgd.register_step_pre_hook(limit)

    def loss_fn(series):
        before, after = series[:, :-1], series[:, 1:]
        deviation, mean = torch.std_mean(before, dim=1, keepdim=True)
        predicted = net((before - mean) / deviation)
        target = (after - mean) / deviation
        return (predicted - target).square().mean()

    return stablenum_torch.program(loss_fn, torch.from_numpy(make_series()), model=net, optimizer=sgd)
