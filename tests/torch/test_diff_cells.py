"""A comparison of programs whose recurrent cells are fused kernels of CUDA.

On a machine without a GPU, kernels that compute and return the same stand in for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stablenum
import stablenum_torch
from stablenum_torch._diagnosis.diff.recurrent_cells import CELLS

aten = torch.ops.aten
BATCH, WIDTH, HIDDEN, LENGTH = 3, 4, 5, 4


def gru_kernel(of_x, of_h, hx, bias_x=None, bias_h=None):
    a, b = of_x + bias_x, of_h + bias_h
    n = HIDDEN
    first = (a + b)[:, : 2 * n].sigmoid()
    new = (a[:, 2 * n :] + first[:, :n] * b[:, 2 * n :]).tanh()
    return new + first[:, n:] * (hx - new), torch.cat([first, new, hx, b[:, 2 * n :]], 1)


def gru_backward_kernel(grad, workspace, has_bias):
    r, z, n, hx, hn = workspace.split(HIDDEN, 1)
    gn = grad * (1 - z) * (1 - n**2)
    gz, gr = grad * (hx - n) * (1 - z) * z, gn * hn * (1 - r) * r
    of_x, of_h = torch.cat([gr, gz, gn], 1), torch.cat([gr, gz, gn * r], 1)
    return of_x, of_h, grad * z, of_x.sum(0), of_h.sum(0)


def lstm_kernel(of_x, of_h, cx, bias_x=None, bias_h=None):
    gates = of_x + of_h + bias_x + bias_h
    n = HIDDEN
    gates = torch.cat(
        [gates[:, : 2 * n].sigmoid(), gates[:, 2 * n : 3 * n].tanh(), gates[:, 3 * n :].sigmoid()], 1
    )
    i, f, g, o = gates.split(n, 1)
    cy = f * cx + i * g
    return o * cy.tanh(), cy, gates


def lstm_backward_kernel(of_hy, of_cy, cx, cy, workspace, has_bias):
    i, f, g, o = workspace.split(HIDDEN, 1)
    of_hy = torch.zeros_like(cx) if of_hy is None else of_hy
    of_c = of_hy * o * (1 - cy.tanh() ** 2) + (0 if of_cy is None else of_cy)
    parts = (
        of_c * g * i * (1 - i),
        of_c * cx * f * (1 - f),
        of_c * i * (1 - g**2),
        of_hy * cy.tanh() * o * (1 - o),
    )
    gates = torch.cat(parts, 1)
    return gates, of_c * f, gates.sum(0)


@pytest.fixture
def kernels() -> Iterator[None]:
    """The kernels, on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    for name, made in {
        "_thnn_fused_gru_cell": gru_kernel,
        "_thnn_fused_gru_cell_backward": gru_backward_kernel,
        "_thnn_fused_lstm_cell": lstm_kernel,
        "_thnn_fused_lstm_cell_backward_impl": lstm_backward_kernel,
    }.items():
        library.impl(name, made, "CPU")
    yield
    library._destroy()


class Cells(nn.Module):
    """The parameters of a cell, in a JAX user's order and layout."""

    def __init__(self, gates: int) -> None:
        super().__init__()
        for name, *shape in (("wx", WIDTH, gates), ("wh", HIDDEN, gates), ("bx", gates), ("bh", gates)):
            shape[-1] *= HIDDEN
            self.register_parameter(name, nn.Parameter(0.4 * torch.randn(shape)))


def gru(p: Any, x: Tensor, h: Tensor) -> Tensor:
    rx, zx, nx = (x @ p.wx + p.bx).chunk(3, -1)
    rh, zh, nh = (h @ p.wh + p.bh).chunk(3, -1)
    r, z = torch.sigmoid(rx + rh), torch.sigmoid(zx + zh)
    return (1 - z) * torch.tanh(nx + r * nh) + z * h


def exchanged(p: Any, x: Tensor, h: Tensor) -> Tensor:
    rx, zx, nx = (x @ p.wx + p.bx).chunk(3, -1)
    rh, zh, nh = (h @ p.wh + p.bh).chunk(3, -1)
    r, z = torch.sigmoid(rx + rh), torch.sigmoid(zx + zh)
    return z * torch.tanh(nx + r * nh) + (1 - z) * h


def fused_gru(p: Any, x: Tensor, h: Tensor) -> Tensor:
    of_x, of_h = x @ p.weight_ih.T, h @ p.weight_hh.T
    return aten._thnn_fused_gru_cell(of_x, of_h, h, p.bias_ih, p.bias_hh)[0]


def lstm(p: Any, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    i, f, g, o = (x @ p.wx + p.bx + state[0] @ p.wh + p.bh).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def fused_lstm(p: Any, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    of_x, of_h = x @ p.weight_ih.T, state[0] @ p.weight_hh.T
    hy, cy, _ = aten._thnn_fused_lstm_cell(of_x, of_h, state[1], p.bias_ih, p.bias_hh)
    return hy, cy


def program(step: Callable[..., Any], model: nn.Module) -> Any:
    torch.manual_seed(99)
    xs = torch.randn(LENGTH, BATCH, WIDTH)

    def loss_fn(xs: Tensor) -> Tensor:
        state: Any = torch.zeros(BATCH, HIDDEN)
        state = (state, state) if step in (lstm, fused_lstm) else state
        total = torch.zeros(())
        for x in xs:
            state = step(model, x, state)
            total = total + (state[0] if isinstance(state, tuple) else state).square().mean()
        return total

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return stablenum_torch.program(loss_fn, xs, model=model, optimizer=optimizer)


def test_a_fused_gru_cell_is_the_same_as_one_written_out(kernels: None) -> None:
    report = stablenum.diff(program(fused_gru, nn.GRUCell(WIDTH, HIDDEN)), program(gru, Cells(3)))
    assert report.ok, str(report)


def test_a_fused_lstm_cell_is_the_same_as_one_written_out(kernels: None) -> None:
    report = stablenum.diff(program(fused_lstm, nn.LSTMCell(WIDTH, HIDDEN)), program(lstm, Cells(4)))
    assert report.ok, str(report)


def test_a_difference_inside_a_fused_cell_is_found_at_its_line(kernels: None) -> None:
    left = program(fused_gru, nn.GRUCell(WIDTH, HIDDEN))
    report = stablenum.diff(left, program(exchanged, Cells(3)))
    assert not report.ok
    assert report.first is not None
    assert report.first.right is not None
    assert report.first.right.code.endswith("+ (1 - z) * h")


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("gates", [3, 4], ids=["gru", "lstm"])
def test_the_formulas_give_what_the_kernels_of_a_gpu_give(gates: int, has_bias: bool) -> None:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, device="cuda")

    name = {3: "_thnn_fused_gru_cell", 4: "_thnn_fused_lstm_cell"}[gates]
    width = gates * HIDDEN
    biases = (drawn(width), drawn(width)) if has_bias else (None, None)
    given = (drawn(BATCH, width), drawn(BATCH, width), drawn(BATCH, HIDDEN), *biases)
    made = getattr(aten, name)(*given)
    torch.testing.assert_close(CELLS[name](*given), made)
    of_hy, of_cy = drawn(BATCH, HIDDEN), drawn(BATCH, HIDDEN)
    backward = f"{name}_backward{'_impl' if gates == 4 else ''}"
    for given in (
        [(of_hy, made[1], has_bias)]
        if gates == 3
        else [
            (a, b, given[2], *made[1:], has_bias) for a, b in ((of_hy, of_cy), (None, of_cy), (of_hy, None))
        ]
    ):
        found = [t for t in getattr(aten, backward)(*given) if t is not None and t.numel()]
        torch.testing.assert_close(list(CELLS[backward](*given)), found)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("packed", [False, True])
def test_a_recurrent_layer_of_a_gpu_is_the_same_as_cells_on_a_cpu(
    layer: Callable[..., Any], packed: bool
) -> None:
    def made(device: str) -> Any:
        torch.manual_seed(0)
        model = layer(WIDTH, HIDDEN, num_layers=2, bidirectional=True).to(device)
        xs = torch.randn(LENGTH, BATCH, WIDTH).to(device)

        def loss_fn(xs: Tensor) -> Tensor:
            if packed:
                xs = nn.utils.rnn.pack_padded_sequence(xs, torch.tensor([4, 2, 1]))
            out, _ = model(xs)
            return (out.data if packed else out).square().mean()

        return stablenum_torch.program(loss_fn, xs, model=model)

    left = made("cuda")
    for report in (stablenum.diff(left, made("cpu")), stablenum.diff(left, made("cuda"))):
        assert report.ok, str(report)
