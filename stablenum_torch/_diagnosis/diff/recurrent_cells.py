"""The formulas of the fused recurrent cells of CUDA, forward and backward.

A kernel also returns what its backward pass reads, the workspace: of a GRU r, z, n, the hidden state and the
hidden part of n; of an LSTM i, f, g and o.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CELLS"]


def _gru(of_x: Any, of_h: Any, hx: Any, bias_x: Any = None, bias_h: Any = None) -> Any:
    (rx, zx, nx), (rh, zh, nh) = (_gates(*one, 3) for one in ((of_x, bias_x), (of_h, bias_h)))
    r, z = torch.sigmoid(rx + rh), torch.sigmoid(zx + zh)
    n = torch.tanh(nx + r * nh)
    return n + z * (hx - n), torch.cat([r, z, n, hx, nh], dim=1)


def _gru_backward(grad: Any, workspace: Any, has_bias: bool) -> Any:
    r, z, n, hx, nh = workspace.chunk(5, dim=1)
    of_n = grad * (1 - z) * (1 - n * n)
    of_r, of_z = of_n * nh * r * (1 - r), grad * (hx - n) * z * (1 - z)
    of_x, of_h = torch.cat([of_r, of_z, of_n], dim=1), torch.cat([of_r, of_z, of_n * r], dim=1)
    biases = (of_x.sum(0), of_h.sum(0)) if has_bias else ()
    return of_x, of_h, grad * z, *biases


def _lstm(of_x: Any, of_h: Any, cx: Any, bias_x: Any = None, bias_h: Any = None) -> Any:
    i, f, g, o = (a + b for a, b in zip(_gates(of_x, bias_x, 4), _gates(of_h, bias_h, 4)))
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    cy = f * cx + i * g
    return o * torch.tanh(cy), cy, torch.cat([i, f, g, o], dim=1)


def _lstm_backward(of_hy: Any, of_cy: Any, cx: Any, cy: Any, workspace: Any, has_bias: bool) -> Any:
    i, f, g, o = workspace.chunk(4, dim=1)
    shown = torch.tanh(cy)
    of_hy, of_cy = (torch.zeros_like(cx) if one is None else one for one in (of_hy, of_cy))
    of_c = of_cy + of_hy * o * (1 - shown * shown)
    of_i, of_f, of_g = of_c * g * i * (1 - i), of_c * cx * f * (1 - f), of_c * i * (1 - g * g)
    of_gates = torch.cat([of_i, of_f, of_g, of_hy * shown * o * (1 - o)], dim=1)
    return of_gates, of_c * f, *((of_gates.sum(0),) if has_bias else ())


def _gates(product: Any, bias: Any, count: int) -> Any:
    return (product if bias is None else product + bias).chunk(count, dim=1)


CELLS: dict[str, Callable[..., Any]] = {
    "_thnn_fused_gru_cell": _gru,
    "_thnn_fused_gru_cell_backward": _gru_backward,
    "_thnn_fused_lstm_cell": _lstm,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_backward,
}
