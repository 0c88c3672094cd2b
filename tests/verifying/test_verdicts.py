"""What is poison, what is a note and what is suspicious: by name, by shape, and by where it is."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from stablenum.commands.verify.contents import Contents, Entry
from stablenum.commands.verify.counts import count
from stablenum.commands.verify.judging import judged
from stablenum.commands.verify.looking import look_at
from stablenum.commands.verify.verdicts import Verdict

NAN, INF = float("nan"), float("inf")


def verdict_on(tree: dict[str, Any], **options: Any) -> Verdict:
    """The verdict on nested dicts of arrays and numbers."""
    arrays, values = [], {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(value, (*path, str(key)))
        elif isinstance(node, list | tuple):
            for i, value in enumerate(node):
                walk(value, (*path, str(i)))
        elif isinstance(node, np.ndarray):
            arrays.append(Entry(path=path, dtype=node.dtype.name, shape=node.shape, read=lambda: node))
        else:
            values[path] = node

    walk(tree, ())
    return judged(Contents(format="test", arrays=tuple(arrays), values=values), **options)


def names(verdict: Verdict) -> list[str]:
    return [p.name for p in verdict.poison]


# --- counting --------------------------------------------------------------------------------

FORMATS = ["float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"]


@pytest.mark.parametrize("dtype", FORMATS)
def test_counts_agree_with_those_of_a_plain_cast(dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(0)
    values = rng.normal(size=200_000) * 10.0 ** rng.integers(-3, 3, 200_000)
    values[rng.integers(0, values.size, 300)] = np.nan
    values[rng.integers(0, values.size, 200)] = np.inf
    values[rng.integers(0, values.size, 100)] = -np.inf
    with np.errstate(all="ignore"):
        given = values.astype(kind).reshape(400, 500)
        wide = given.astype(np.float64)
    found = count(given, signed=False)
    assert (found.size, found.nan) == (values.size, np.isnan(wide).sum())
    assert (found.plus_inf, found.minus_inf) == ((wide == np.inf).sum(), (wide == -np.inf).sum())
    assert found.negative == (wide < 0).sum()
    assert found.largest == np.abs(wide[np.isfinite(wide)]).max()
    assert found.first == tuple(np.argwhere(~np.isfinite(wide))[0])


def test_every_bit_pattern_of_sixteen_bits():
    every = np.arange(2**16, dtype=np.uint16)
    for name in ("float16", "bfloat16"):
        values = every.view(np.dtype(getattr(ml_dtypes, name, name)))
        with np.errstate(all="ignore"):
            wide = values.astype(np.float32)
        found = count(values)
        assert (found.nan, found.plus_inf, found.minus_inf) == (np.isnan(wide).sum(), 1, 1)


def test_counts_of_other_layouts():
    assert count(np.asarray(INF)).first == ()
    assert count(np.zeros((0, 3), np.float32)).size == 0
    assert count(np.asarray([1.0, complex(0, NAN)])).nan == 1
    assert count(np.asarray([1.0, complex(0, NAN)])).first == (1,)
    strided = np.ones((4, 6), np.float32)[::2, ::3]
    assert (count(strided).size, count(strided.T).nonfinite) == (4, 0)
    assert count(np.asarray([3.0, -1.0]), signed=False).first == (1,)
    assert count(np.asarray([70000.0, 65519.0, 1.0])).overflow == {"float16": 1}
    assert count(np.asarray([3.4e38])).overflow == {"float16": 1, "bfloat16": 1}


# --- poison or not ---------------------------------------------------------------------------

MASK = np.where(np.tri(3, dtype=bool), 0.0, -INF)
ADAM = {"count": np.asarray(3), "mu": {"w": np.ones(2)}, "nu": {"w": np.ones(2)}}


@pytest.mark.parametrize(
    ("tree", "poison"),
    [
        ({"w": np.asarray([1.0, NAN])}, ["w"]),
        ({"model": {"w": np.asarray(INF)}}, ["model.w"]),
        ({"model": {"mask": MASK}}, []),
        ({"model": {"layer.attn_mask": MASK}}, []),
        ({"model": {"mask": MASK[0]}}, ["model.mask"]),
        ({"model": {"mask": MASK + 1}}, ["model.mask"]),
        ({"model": {"mask": -MASK}}, ["model.mask"]),
        ({"model": {"attn.weight": MASK}}, ["model.attn.weight"]),
        ({"params": {"mask": {"kernel": {"value": MASK}}}}, ["params.mask.kernel.value"]),
        ({"model": {"w": np.ones(2)}, "best": np.asarray(INF)}, []),
        ({"model": {"w": np.ones(2)}, "best": INF, "last": NAN}, ["last"]),
        ({"model": {"w": np.ones(2)}, "extra": {"best": np.asarray([INF]), "list": [INF, 1.0]}}, []),
        ({"model": {"w": np.ones(2)}, "extra": {"loss": np.asarray([NAN])}}, ["extra.loss"]),
        ({"model": {"w": np.ones(2)}, "extra": {"list": [NAN, 1.0]}}, ["extra.list.0"]),
        ({"opt_state": {"count": INF}}, ["opt_state.count"]),
        ({"model": {"w": np.ones(2)}, "extra": {"ema": np.asarray([1.0, NAN])}}, ["extra.ema"]),
        ({"w": np.ones(2), "layer": {"scale": np.asarray(NAN)}}, ["layer.scale"]),
        ({"scale": np.asarray(NAN), "layer": {"w": np.ones(2)}}, ["scale"]),
        ({"opt_state": [ADAM | {"nu": {"w": np.asarray([1.0, -1.0])}}]}, ["opt_state.0.nu.w"]),
        ({"opt_state": [ADAM | {"mu": {"w": np.asarray([1.0, -1.0])}}]}, []),
        ({"0": ADAM | {"nu": {"w": np.asarray([1.0, -1.0])}}}, ["0.nu.w"]),
        ({"nu": {"w": np.asarray([1.0, -1.0])}}, []),
        ({"opt_state": {"best_value": np.asarray(INF)}}, []),
        ({"opt_state": {"best_value": np.asarray(NAN)}}, ["opt_state.best_value"]),
        ({"opt_state": {"buffer": np.asarray([1.0, INF])}}, ["opt_state.buffer"]),
        ({"opt_state": {"count": np.asarray(INF)}}, ["opt_state.count"]),
        ({"opt_state": {"hyperparams": {"learning_rate": np.asarray(INF)}}},
         ["opt_state.hyperparams.learning_rate"]),
    ],
)  # fmt: skip
def test_what_is_poison_follows_from_names_shapes_and_values(tree, poison):
    assert names(verdict_on(tree)) == poison


def adam_state(**settings: Any) -> dict[str, Any]:
    kept = {"step": np.asarray(3.0), "exp_avg": np.ones(3), "exp_avg_sq": np.ones(3)}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "params": [0]} | settings
    return {"state": {"0": kept}, "param_groups": [group]}


@pytest.mark.parametrize(
    ("settings", "poison"),
    [
        ({}, []),
        ({"lr": NAN}, ["optimizer.param_groups.0.lr"]),
        ({"lr": INF}, ["optimizer.param_groups.0.lr"]),
        ({"betas": (0.9, NAN)}, ["optimizer.param_groups.0.betas.1"]),
        ({"max_norm": INF}, []),
        ({"max_norm": NAN}, ["optimizer.param_groups.0.max_norm"]),
    ],
)
def test_settings_of_an_optimizer(settings, poison):
    assert names(verdict_on({"optimizer": adam_state(**settings)})) == poison


def test_a_guards_state_is_not_judged():
    recorder = {"floats": np.full((4, 4), NAN), "ints": np.zeros((4, 4), int)}
    guard = {"recorder": recorder, "loss_scale": {"scale": np.asarray(1.0)}, "clip": [np.full(8, INF)]}
    for tree, place in (
        ({"opt_state": [{"guard": guard, "names_id": np.asarray(3)}]}, "opt_state.0.guard"),
        ({"guard": {"version": 1, "names": ["w"], "state": guard}}, "guard.state"),
        ({"state": guard}, "state"),
    ):
        verdict = verdict_on({"params": {"w": np.ones(2)}} | tree)
        assert verdict.poison == ()
        assert verdict.notes[0].startswith(f"{place} is a guard's state")


def test_what_is_allowed_by_name_is_a_note():
    tree = {"model": {"alibi": np.asarray([1.0, -INF]), "w": np.asarray([NAN])}}
    verdict = verdict_on(tree, allow=("*.alibi",))
    assert names(verdict) == ["model.w"]
    assert verdict.notes == ("model.alibi holds 1 -inf of 2 numbers: allowed by name",)
    optimizer = {"optimizer": adam_state(lr=INF)}
    assert names(verdict_on(optimizer, allow=("optimizer.param_groups.*",))) == []


def test_ranges_are_noted_for_parameters_alone():
    tree = {"model": {"a": np.asarray([1e5, 1.0]), "b": np.asarray([1e39])}, "optimizer": adam_state()}
    tree["optimizer"]["state"]["0"]["exp_avg_sq"] = np.full(3, 1e30)
    verdict = verdict_on(tree)
    assert verdict.notes == (
        "2 numbers would be inf in float16 (up to 1e+39): model.a, model.b",
        "1 number would be inf in bfloat16 (up to 1e+39): model.b",
    )
    assert verdict.poison == ()


# --- the audit -------------------------------------------------------------------------------


def test_the_audit_finds_what_is_suspicious_in_moments():
    state = adam_state(param_names=["w"])
    state["state"]["0"]["exp_avg_sq"] = np.asarray([1.0, 0.0, 1.0])
    verdict = verdict_on({"model": {"w": np.ones(3)}, "optimizer": state})
    assert names(verdict) == []
    assert [risk.name for risk in verdict.suspicious] == ["w"]
    assert "v is 0 but m is not, in 1 of 3 elements" in verdict.suspicious[0].what


def test_the_audit_compares_with_the_parameter_of_the_same_name():
    state = adam_state(param_names=["net.w"], lr=1e-9)
    tree = {"model": {"net.w": np.full(3, 100.0, np.float32)}, "optimizer": state}
    assert "w + dw == w" in " ".join(risk.what for risk in verdict_on(tree).suspicious)
    tree["model"] = {"net.w": np.zeros(3, np.float32)}
    assert verdict_on(tree).suspicious == ()


def test_a_narrow_state_with_a_lost_eps_is_a_danger():
    state = adam_state()
    for name in ("exp_avg", "exp_avg_sq"):
        state["state"]["0"][name] = np.zeros(3, np.float16)
    risks = verdict_on({"optimizer": state}).suspicious
    assert any("is 0 in float16" in risk.what for risk in risks)


def test_optimizers_of_torch_are_told_apart_by_what_they_keep(tmp_path):
    """Otherwise a formula that is not theirs would be applied."""
    makers = {
        "adam": torch.optim.AdamW,
        "adamax": torch.optim.Adamax,
        "nadam": torch.optim.NAdam,
        "": torch.optim.RAdam,
        "rmsprop": torch.optim.RMSprop,
        "adadelta": torch.optim.Adadelta,
        "adagrad": torch.optim.Adagrad,
    }
    from stablenum.commands.verify.formats.torch_files import read
    from stablenum.commands.verify.layout import Layout
    from stablenum.commands.verify.limits import Limits
    from stablenum.commands.verify.moments import rows_of

    for kind, make in makers.items():
        w = torch.nn.Parameter(torch.ones(3))
        opt = make([("w", w)], lr=0.1)
        w.grad = torch.ones(3)
        opt.step()
        torch.save({"model": {"w": w.detach()}, "optimizer": opt.state_dict()}, tmp_path / "x.pt")
        with contextlib.closing(read(tmp_path / "x.pt", Limits())) as contents:
            layout = Layout(contents)
            state = {e.name: e for e in layout.contents.arrays if e.name == "model.w"}
            (row,) = rows_of(layout.slots, state, lambda entry: None)
        assert (row.name, row.law.kind) == ("w", kind)
        assert row.law.step == (1.0 if kind else None)
        assert row.measured.parameter_rms == pytest.approx(float(w.detach().square().mean().sqrt()))


def test_a_checkpoint_of_a_run_is_the_same_as_its_audit(tmp_path):
    import stablenum_torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    opt = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    model(torch.ones(2, 4)).sum().backward()
    model.weight.grad[0, 0] = 1e-30
    opt.step()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "x.pt")
    (outcome,), _ = look_at(Path(tmp_path / "x.pt"))
    wanted = {str(risk) for risk in stablenum_torch.audit(opt, [None, None]).risks}
    assert {str(risk) for risk in outcome.verdict.suspicious} == wanted != set()
