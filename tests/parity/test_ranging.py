"""The same network in PyTorch and in four kinds of JAX gives the same report, and its scale works."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import stablenum_jax
import stablenum_torch
from tests.parity.range_models import FLAVOURS, batch, jax_case, torch_loss, torch_net
from tests.selection import only

LR = 1e-3


@pytest.fixture(scope="module")
def from_torch():
    net = torch_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=1e-2)
    return stablenum_torch.range_report(net, batch(), loss_fn=torch_loss, optimizer=optimizer)


def from_jax(flavour):
    loss, params = jax_case(flavour)
    tx = optax.adamw(LR, weight_decay=1e-2)
    return stablenum_jax.range_report(loss, params, *map(jnp.asarray, batch()), optimizer=tx)


def test_torch_names_both_modules(from_torch):
    check_names(from_torch)


def check_names(report):
    verdict = report.verdicts["float16"]
    found = {what: {t.module for t in verdict.troubles if t.what == what} for what in ("overflow", "saved")}
    assert found["overflow"] == {"loud"}
    assert {t.module for t in verdict.troubles if t.what == "saved" and t.kind == "gradient"} == {"quiet"}
    assert "quiet" in found["saved"]
    assert verdict.flushed_before > 0.05
    assert verdict.flushed_after < 1e-3
    assert f"float16 works with scale 2^{int(np.log2(verdict.loss_scale))}" in verdict.sentence
    assert "loud overflows" in verdict.sentence
    assert report.verdicts["bfloat16"].works


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_rows_are_the_same(flavour, from_torch):
    report = from_jax(flavour)
    check_names(report)
    rows = {(row.kind, row.module): row for row in report.rows}
    expected = {(row.kind, row.module): row for row in from_torch.rows}
    if flavour == "plain":  # no module is around all of it
        expected = {key: row for key, row in expected.items() if key[1]}
    assert rows.keys() == expected.keys()
    for key, row in rows.items():
        other = expected[key]
        assert (row.elements, row.nan, row.inf) == (other.elements, other.nan, other.inf), key
        assert row.amax == pytest.approx(other.amax, rel=1e-4), key
        # A value next to a limit may be on either side of it, because the order of the sums differs.
        for name in report.formats:
            for a, b in (
                (row.overflow[name], other.overflow[name]),
                (row.flushed(name), other.flushed(name)),
                (row.subnormal[name], other.subnormal[name]),
                (row.lost.get(name, 0), other.lost.get(name, 0)),
            ):
                assert abs(a - b) <= max(2, 0.004 * row.elements), (key, name)
    assert report.loss_scale() == from_torch.loss_scale()
    for name in report.formats:
        ours, theirs = report.verdicts[name], from_torch.verdicts[name]
        assert ours.works == theirs.works
        assert {(t.module, t.kind, t.what) for t in ours.troubles if t.module} == {
            (t.module, t.kind, t.what) for t in theirs.troubles if t.module
        }
        assert ours.flushed_before == pytest.approx(
            theirs.flushed_before, abs=0.1 if flavour == "plain" else 0.005
        )


def flushed(wide, narrow):
    """The fraction of elements that become 0 in float16."""
    gone = sum(np.count_nonzero((b == 0) & (a != 0)) for a, b in zip(wide, narrow))
    return gone / sum(a.size for a in wide)


def test_the_scale_saves_the_gradients_in_torch(from_torch):
    shares = {}
    for scale in (None, from_torch.loss_scale()):
        net = torch_net()
        plain = torch.autograd.grad(torch_loss(net, batch()), list(net.parameters()))
        optimizer = stablenum_torch.wrap(torch.optim.SGD(net.parameters(), lr=LR), loss_scale=scale)
        optimizer.scale(torch_loss(net, batch())).backward()
        halves = [p.grad.half() for p in net.parameters()]
        assert all(half.isfinite().all() for half in halves)
        shares[scale] = flushed([g.numpy() for g in plain], [half.float().numpy() for half in halves])
    assert shares[None] > 0.05
    assert shares[from_torch.loss_scale()] < 1e-3


@pytest.mark.parametrize("flavour", only(["plain"], ["linen", "plain"]))
def test_the_scale_saves_the_gradients_in_jax(flavour):
    loss, params = jax_case(flavour)
    arguments = tuple(map(jnp.asarray, batch()))
    report = stablenum_jax.range_report(loss, params, *arguments)
    plain = [np.asarray(g) for g in jax.tree.leaves(jax.grad(loss)(params, *arguments))]
    shares = {}
    for scale in (None, report.loss_scale()):
        opt_state = optax.chain(stablenum_jax.guard(loss_scale=scale), optax.sgd(LR)).init(params)
        _, grads = stablenum_jax.value_and_grad(loss, opt_state)(params, *arguments)
        halves = [np.asarray(g.astype(jnp.float16)) for g in jax.tree.leaves(grads)]
        assert all(np.isfinite(half).all() for half in halves)
        shares[scale] = flushed(plain, halves)
    assert shares[None] > 0.05
    assert shares[report.loss_scale()] < 1e-3
