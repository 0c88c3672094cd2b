"""GuardedOptimizer.explain: the step that was skipped, with its loss scale and its random numbers."""

from __future__ import annotations

import copy
import time

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import stablenum
import stablenum_torch as st
from stablenum.diagnosis import Cause


def vanishing(model: nn.Module, x: Tensor) -> Tensor:
    """Dropout sometimes zeroes a whole row; its norm divides 0 by 0."""
    h = F.dropout(model(x).abs() + 1.0, 0.5)
    return (h / h.sum(1, keepdim=True)).square().sum()


@pytest.mark.parametrize("cleared", ["before", "after"])
def test_a_failure_that_depends_on_the_seed_is_reproduced(cleared: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 3), torch.ones(1, 3)
    opt = st.wrap(torch.optim.SGD(model.parameters(), lr=1e-3), names=model)
    failed = 0
    for _ in range(40):
        if cleared == "before":
            torch.rand(3)  # the next batch
            opt.zero_grad()
        opt.backward(vanishing(model, x))
        opt.step()
        skipped = not opt.last["applied"]
        if cleared == "after":
            opt.zero_grad()
        if skipped:
            failed += 1
            before = torch.get_rng_state()
            report = opt.explain(lambda: vanishing(model, x))
            assert report.findings[0].operation == "div"
            assert report.evidence.reproduced is True
            assert report.verdict.cause is Cause.DOMAIN
            assert torch.equal(torch.get_rng_state(), before)
    assert 2 <= failed <= 12  # one in eight


def test_a_step_that_does_not_fail_again_is_transient() -> None:
    w = nn.Parameter(torch.ones(2))
    opt = st.wrap(torch.optim.SGD([w], lr=0.1))
    w.grad = torch.full((2,), torch.inf)
    opt.step()
    assert opt.explain(lambda: w.sum()).verdict.cause is Cause.TRANSIENT


def test_a_spike_is_no_failure_that_did_not_come_back() -> None:
    w = nn.Parameter(torch.ones(2))
    opt = st.wrap(torch.optim.SGD([w], lr=0.0), spike="skip")
    for step in range(70):
        opt.zero_grad()
        opt.backward((w * (1 + step % 3) * (1e4 if step == 69 else 1)).sum())
        opt.step()
    assert opt.last["reason"].name == "SPIKE_LOSS"
    report = opt.explain(lambda: (w * 1e4).sum())
    assert report.ok
    assert report.verdict.cause is Cause.NOTHING_WRONG
    assert "skipped this step as SPIKE_LOSS: its loss is far above" in str(report)


def test_a_step_that_was_applied_is_healthy() -> None:
    w = nn.Parameter(torch.ones(2))
    opt = st.wrap(torch.optim.SGD([w], lr=0.1))
    opt.backward(w.sum())
    opt.step()
    assert opt.explain(lambda: w.sum()).ok
    assert st.wrap(torch.optim.SGD([w], lr=0.1)).explain(lambda: w.sum()).ok  # before any step


@pytest.mark.parametrize("own_backward", [False, True])
def test_the_failed_step_is_replayed_with_its_scale(own_backward: bool) -> None:
    w = nn.Parameter(torch.ones(2, dtype=torch.float16))
    opt = st.wrap(torch.optim.SGD([w], lr=0.1), loss_scale=stablenum.DynamicLossScale(init_scale=2.0**16))

    def closure() -> Tensor:
        opt.zero_grad()
        loss = w.float().sum()
        if own_backward:
            opt.backward(loss)
        return loss

    opt.backward(w.float().sum())
    opt.step()
    assert opt.loss_scale == 2.0**15
    saved = opt.guard_state_dict()
    report = opt.explain(closure)
    assert report.verdict.cause is Cause.LOSS_SCALE
    assert report.evidence.loss_scale == 2.0**16
    assert opt.guard_state_dict() == saved


def test_with_several_ranks_a_clean_replay_points_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    w = nn.Parameter(torch.ones(2))
    opt = st.wrap(torch.optim.SGD([w], lr=0.1))
    w.grad = torch.full((2,), torch.inf)
    opt.step()
    monkeypatch.setattr("stablenum_torch._diagnosis.explain.several_ranks", lambda: True)
    assert opt.explain(lambda: (w * 2).sum()).verdict.cause is Cause.OTHER_RANK
    assert opt.explain(lambda: (w - 1).log().sum()).verdict.cause is Cause.DOMAIN


def test_a_bad_micro_batch_before_the_replayed_one_is_noted() -> None:
    w = nn.Parameter(torch.ones(2))
    opt = st.wrap(torch.optim.SGD([w], lr=0.1))
    for batch in (torch.zeros(2), torch.ones(2)):
        opt.backward((w * batch).log().sum())
    opt.step()
    report = opt.explain(lambda: (w * torch.ones(2)).log().sum())
    assert any("several backward passes" in note for note in report.notes)
    assert opt.explain(lambda: (w * torch.zeros(2)).log().sum()).notes == ()


def test_explain_works_on_a_copy_without_history() -> None:
    w = nn.Parameter(torch.ones(2))
    opt = copy.deepcopy(st.wrap(torch.optim.SGD([w], lr=0.1)))
    assert opt.explain(lambda: (opt.param_groups[0]["params"][0] - 1.0).log().sum()).findings


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.out(self.mlp(x))


class Transformer(nn.Module):
    def __init__(self, width: int = 256, depth: int = 4, words: int = 500) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(depth)])
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


@pytest.mark.slow
def test_a_transformer_is_explained_in_time() -> None:
    torch.manual_seed(0)
    model = Transformer()
    assert sum(p.numel() for p in model.parameters()) > 3e6
    opt = st.wrap(torch.optim.AdamW(model.parameters()), names=model)
    tokens = torch.randint(0, 500, (8, 128))
    targets = torch.randint(0, 500, (8 * 128,))

    def loss() -> Tensor:
        return F.cross_entropy(model(tokens).reshape(-1, 500), targets)

    def bad() -> Tensor:
        value = loss()
        return value + torch.sqrt(model.head.bias.sum() * 0)

    start = time.perf_counter()
    opt.backward(loss())
    opt.step()
    plain = time.perf_counter() - start
    opt.zero_grad()
    opt.backward(bad())
    opt.step()
    assert not opt.last["applied"]
    start = time.perf_counter()
    report = opt.explain(bad)
    took = time.perf_counter() - start
    assert report.findings[0].operation == "sqrt"
    assert took < 15.0, f"{took:.2f} s; a step takes {plain:.2f} s"
    report_of_healthy = st.replay(loss)
    assert report_of_healthy.ok
    assert report_of_healthy.seconds is not None
    assert report_of_healthy.seconds < 15.0
