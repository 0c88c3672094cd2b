"""Checkpoints in PyTorch: every planted poison is refused, no good state is, and nothing is half loaded."""

from __future__ import annotations

import collections
import copy
import json
import logging
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import stablenum_torch as st
from stablenum import CheckpointError, PoisonedStateError
from stablenum.checkpoints.manifest import MANIFEST
from stablenum_torch._recovery.states import Loading
from tests.injection import executed_lines, interrupted_at, some
from tests.torch.training_states import FORMATS, Training, same_state, tensors_of

ROOT = Path(__file__).parents[2]
BAD = (math.nan, math.inf, -math.inf)


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """The state dicts, without tensors that are shared with the objects."""
    take = {name: v.state_dict() if hasattr(v, "state_dict") else v for name, v in state.items()}
    return copy.deepcopy(take)


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_resumed_training_is_equal_to_the_bit(tmp_path, format_name):
    run = Training().train(4)
    run.extra["epoch"] = 1
    checkpoints = st.Checkpoints(tmp_path, format=format_name)
    checkpoints.save(4, run.state(rng=torch.get_rng_state()))
    wanted = saved(run.state(rng=torch.get_rng_state()))
    torch.rand(3)
    resumed = Training(seed=1)
    state = resumed.state(rng=None)
    assert checkpoints.load(state) == 4
    assert same_state(saved(state), wanted)
    assert state["extra"] == {"epoch": 1, "best": math.inf}
    resumed.extra = state["extra"]
    assert resumed.model.state_dict()._metadata == run.model.state_dict()._metadata
    assert same_state(saved(resumed.train(4, 4).state()), saved(run.train(4, 4).state()))


@pytest.mark.parametrize("format_name", FORMATS)
def test_the_training_goes_on_with_memory_of_its_own(tmp_path, format_name):
    """What is loaded is no view of the file, and saving changes nothing."""
    run = Training().train(3)
    before, checkpoints = saved(run.state()), st.Checkpoints(tmp_path, format=format_name)
    folder = checkpoints.save(3, run.state())
    assert same_state(saved(run.state()), before)
    checkpoints.load(run.state())
    for file in folder.iterdir():
        file.write_bytes(b"0" * file.stat().st_size)
    assert same_state(saved(run.state()), before)


# Poison


@pytest.mark.parametrize("format_name", FORMATS)
def test_every_planted_poison_is_refused_and_named(tmp_path, format_name):
    """In each tensor of the state, at some element."""
    run, draw = Training().train(3), random.Random(0)
    checkpoints = st.Checkpoints(tmp_path, format=format_name)
    checkpoints.save(3, run.state())
    places = tensors_of(run.state())
    kinds = ("model.inner.weight", "model.norm.running_mean", "model.norm.running_var", "model.mask")
    assert {*kinds, "optimizer.state.0.exp_avg", "optimizer.state.3.exp_avg_sq"} <= set(places)
    assert len(places) > 20
    for name, tensor in places.items():
        for bad in BAD:
            if (name, bad) == ("model.mask", -math.inf):
                continue  # that is what a mask is made of
            flat = tensor.view(-1)
            at = draw.randrange(len(flat))
            good, flat[at] = flat[at].clone(), bad
            with pytest.raises(PoisonedStateError) as caught:
                checkpoints.save(4, run.state())
            assert name in caught.value.names, (name, bad)
            flat[at] = good
    assert checkpoints.steps() == [3]
    assert checkpoints.save(4, run.state()), "nothing was left behind"


POISONED = {
    "float64": torch.tensor([1.0, math.nan], dtype=torch.float64),
    "float16": torch.tensor([1.0, math.inf], dtype=torch.float16),
    "bfloat16": torch.tensor([[1.0, -math.inf]], dtype=torch.bfloat16),
    "float8_e4m3fn": torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn),
    "float8_e5m2": torch.tensor([1.0, math.inf]).to(torch.float8_e5m2),
    "float8_e8m0fnu": torch.tensor([255], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "complex64": torch.tensor([1 + 1j, complex(0, math.nan)]),
    "complex128": torch.tensor([complex(math.inf, 0), 1], dtype=torch.complex128),
    "0-d": torch.tensor(math.nan),
    "a view": torch.tensor([[1.0, math.nan], [1.0, 1.0]])[:, 1],
    "transposed": torch.tensor([[1.0, math.nan], [1.0, 1.0]]).T,
    "expanded": torch.tensor([math.inf]).expand(3),
    "last of many": torch.tensor([*[0.0] * 9999, math.nan]),
    "a number": math.nan,
    "a complex number": complex(math.inf, math.nan),
    "in a list": [1.0, [2.0, (math.nan,)]],
    "in a dict": {0: {"x": torch.tensor([math.nan])}},
    "a parameter": nn.Parameter(torch.tensor([math.nan])),
    "without gradient": torch.tensor([math.nan], requires_grad=True) * 2,
}


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("kind", POISONED)
def test_poison_of_every_kind_is_refused(tmp_path, format_name, kind):
    checkpoints = st.Checkpoints(tmp_path, format=format_name)
    with pytest.raises(PoisonedStateError, match=r"step 1 is not saved, because it is not finite: extra\.x"):
        checkpoints.save(1, {"extra": {"a": 1.0, "x": POISONED[kind]}})
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_poison_in_a_sparse_tensor_is_refused(tmp_path):
    dense = torch.tensor([[0.0, math.nan], [1.0, 0.0]])
    for sparse in (dense.to_sparse(), dense.to_sparse_csr()):
        with pytest.raises(PoisonedStateError, match="x"):
            st.Checkpoints(tmp_path).save(1, {"x": sparse})
    for step, good in enumerate((dense.nan_to_num().to_sparse(), dense.nan_to_num().to_sparse_csr())):
        state = {"x": good}
        st.Checkpoints(tmp_path).save(step, state)
        assert st.Checkpoints(tmp_path).load(state) == step
        assert torch.equal(state["x"].to_dense(), dense.nan_to_num())


def test_a_nested_tensor_is_looked_into(tmp_path):
    good, bad = torch.ones(2), torch.tensor([math.inf])
    with pytest.raises(PoisonedStateError, match=r"x \(1 inf of 3\)"):
        st.Checkpoints(tmp_path).save(1, {"x": torch.nested.nested_tensor([good, bad], layout=torch.jagged)})
    state = {"x": torch.nested.nested_tensor([good, good[:1]], layout=torch.jagged)}
    st.Checkpoints(tmp_path).save(1, state)
    assert st.Checkpoints(tmp_path).load(state) == 1
    assert [part.tolist() for part in state["x"].unbind()] == [[1.0, 1.0], [1.0]]


@pytest.mark.parametrize("value", [np.array([1.0, np.nan]), np.float32("nan"), np.array([1j * np.inf])])
def test_poison_in_what_numpy_holds_is_refused(tmp_path, value):
    """Someone may have allowed numpy's types for torch.load."""
    with pytest.raises(PoisonedStateError, match="x"):
        st.Checkpoints(tmp_path).save(1, {"x": value})


GOOD = {
    "a mask": lambda: {"mask": Training().model},
    "largest numbers": lambda: {"x": torch.tensor([torch.finfo(torch.float32).max] * 1000)},
    "largest float64": lambda: {
        "x": torch.full((1000,), torch.finfo(torch.float64).max, dtype=torch.float64)
    },
    "largest float16": lambda: {"x": torch.full((1000,), 65504.0, dtype=torch.float16)},
    "largest bfloat16": lambda: {
        "x": torch.full((9,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    },
    "largest complex": lambda: {"x": torch.tensor([complex(3e38, 3e38)])},
    "subnormal": lambda: {"x": torch.tensor([1e-45, -0.0])},
    "empty": lambda: {"x": torch.empty(0, 3), "y": torch.empty(0, dtype=torch.bfloat16), "z": {}, "l": []},
    "integers": lambda: {"x": torch.arange(3), "y": torch.tensor([True]), "z": torch.tensor(2**40)},
    "0-d": lambda: {"x": torch.tensor(1.5), "y": torch.tensor(3)},
    "bfloat16": lambda: {"x": torch.ones(3, dtype=torch.bfloat16)},
    "complex": lambda: {"x": torch.tensor([1 + 2j]), "y": torch.tensor([1j], dtype=torch.complex128).conj()},
    "float8": lambda: {"x": torch.ones(3).to(torch.float8_e4m3fn), "y": torch.ones(3).to(torch.float8_e5m2)},
    "views": lambda: {"x": torch.eye(3)[1:, 1], "y": torch.eye(3).T, "z": torch.ones(1).expand(4)},
    "numbers": lambda: {"x": [math.inf, -math.inf, 10**30, -0.0], "y": (1, 2j), "z": {3: None, "b": b"x"}},
    "one number": lambda: {
        "extra": {"best": torch.tensor(math.inf), "worst": torch.tensor([-math.inf])},
        "best": torch.tensor(math.inf),
    },
    "a mask of its own": lambda: {"mask": torch.full((3, 3), -math.inf).triu(1)},
    "a random state": lambda: {"x": torch.get_rng_state(), "y": random.Random(0).getstate()},
    "a fresh optimizer": lambda: {"opt": torch.optim.Adam(nn.Linear(2, 1).parameters())},
    "a plateau": lambda: {
        "s": torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.ones(1)], lr=0.1))
    },
}


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("kind", GOOD)
def test_no_good_state_is_refused_and_each_is_loaded_as_it_was(tmp_path, format_name, kind):
    state = GOOD[kind]()
    wanted = saved(state)
    checkpoints = st.Checkpoints(tmp_path, format=format_name)
    checkpoints.save(1, state)
    found = {name: value if hasattr(value, "state_dict") else None for name, value in state.items()}
    assert checkpoints.load(found) == 1
    assert same_state(saved(found), wanted)


def stepped(optimizer: Any, params: list[nn.Parameter]) -> Any:
    """The optimizer after a step."""
    for p in params:
        grad = torch.randn_like(p)
        p.grad = grad.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else grad
    optimizer.step(lambda: sum((p * p).sum() for p in params))
    return optimizer


def optimizers() -> dict[str, Any]:
    """Functions that make each optimizer of torch, and each of ours that keeps copies, for parameters."""
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    base, ours = torch.optim.Optimizer, (st.MasterWeights, st.KahanUpdate, st.StochasticRounding)
    found = {kind.__name__: kind for kind in kinds if issubclass(kind, base) and kind is not base}
    return found | {kind.__name__: lambda p, kind=kind: kind(p, torch.optim.AdamW) for kind in ours}


@pytest.mark.parametrize("format_name", FORMATS)
def test_the_state_of_every_optimizer_is_carried(tmp_path, format_name):
    found = optimizers()
    assert {"LBFGS", "SparseAdam", "Muon", "MasterWeights"} <= set(found)
    for name, make in found.items():
        dtype = torch.bfloat16 if name in ("MasterWeights", "KahanUpdate", "StochasticRounding") else None
        params = [nn.Parameter(torch.randn(4, 3, dtype=dtype))]
        opt, fresh = stepped(make(params), params), make(params)
        checkpoints = st.Checkpoints(tmp_path / name, format=format_name)
        checkpoints.save(1, {"opt": opt})
        checkpoints.load({"opt": fresh})
        assert same_state(fresh.state_dict(), opt.state_dict()), name


SCHEDULERS = {
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda epoch: 0.9**epoch),
    "steps": lambda opt: lr_scheduler.MultiStepLR(opt, [2, 4]),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 5),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=10),
    "cyclic": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.1),
    "in sequence": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt), lr_scheduler.LinearLR(opt)], [2]
    ),
    "chained": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt), lr_scheduler.LinearLR(opt)]
    ),
    "averaging": lambda opt: torch.optim.swa_utils.SWALR(opt, 0.05),
}


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_the_state_of_every_scheduler_is_carried(tmp_path, format_name, kind):
    params = [nn.Parameter(torch.ones(4, 3))]
    opt, other = (torch.optim.SGD(params, lr=0.1, momentum=0.9) for _ in range(2))
    scheduler, fresh = SCHEDULERS[kind](opt), SCHEDULERS[kind](other)
    stepped(opt, params)
    scheduler.step()
    checkpoints = st.Checkpoints(tmp_path, format=format_name)
    checkpoints.save(1, {"scheduler": scheduler, "scaler": torch.amp.GradScaler("cpu")})
    checkpoints.load({"scheduler": fresh})
    assert same_state(fresh.state_dict(), scheduler.state_dict())


@pytest.mark.parametrize("format_name", FORMATS)
def test_what_is_allowed_by_name_is_saved_and_loaded(tmp_path, format_name):
    state = {"model": {"bias.mask": torch.tensor([-math.inf, 1.0]), "weight": torch.ones(2)}, "b": math.nan}
    checkpoints = st.Checkpoints(tmp_path, format=format_name, allow=("model.*.mask", "b"))
    checkpoints.save(1, state)
    found = {"model": None, "b": None}
    st.Checkpoints(tmp_path, format=format_name).load(found)
    assert same_state(found, state)
    state["model"]["weight"][0] = -math.inf
    with pytest.raises(PoisonedStateError, match=r"finite: model\.weight \(1 -inf of 2\)"):
        checkpoints.save(2, state)


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_poisoned_state_is_set_aside(tmp_path, format_name, caplog):
    run = Training().train(3)
    checkpoints = st.Checkpoints(tmp_path, format=format_name, on_poisoned="set aside")
    checkpoints.save(3, run.state())
    wanted = saved(run.state())
    run.model.norm.running_mean[2] = math.nan
    with caplog.at_level(logging.WARNING, "stablenum"):
        folder = checkpoints.save(4, run.state())
    assert "step 4 is not finite (model.norm.running_mean (1 NaN of 6)) and was set aside in" in caplog.text
    assert folder == tmp_path / "post-mortem" / "step-000000004"
    assert json.loads((folder / MANIFEST).read_text("utf-8"))["poisoned"] == ["model.norm.running_mean"]
    assert checkpoints.load(run.state()) == 3
    assert same_state(saved(run.state()), wanted)


def test_a_checkpoint_with_nan_that_torch_save_wrote_is_found_by_its_values(tmp_path):
    """The checksum of a manifest may be right, and the values bad: as when a NaN is allowed no more."""
    checkpoints = st.Checkpoints(tmp_path)
    checkpoints.save(1, {"x": torch.ones(2)})
    folder = checkpoints.save(2, {"x": torch.ones(2)})
    torch.save({"x": torch.tensor([math.nan, 1.0])}, folder / "state.pt")
    manifests = sys.modules["stablenum.checkpoints.manifest"]
    manifest = manifests.read_manifest(folder)
    record = {"state.pt": manifests.record_of(folder / "state.pt")}
    manifests.dataclasses.replace(manifest, files=record).write(folder)
    assert checkpoints.load({"x": None}) == 1
    with pytest.raises(CheckpointError, match=r"not finite: x \(1 NaN of 2\)"):
        checkpoints.load({"x": None}, step=2)


# Bytes that have changed


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_changed_byte_in_any_file_is_found(tmp_path, format_name, caplog):
    """At both ends of each file and at 12 other places."""
    run = Training().train(2)
    checkpoints = st.Checkpoints(tmp_path, format=format_name)
    checkpoints.save(1, run.state())
    folder, draw = checkpoints.save(2, run.state()), random.Random(0)
    state = run.state()
    before = saved(state)
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) == {"torch": 2, "safetensors": 3, "dcp": 4}[format_name]
    for file in files:
        good = file.read_bytes()
        places = {*range(4), *range(len(good) - 4, len(good)), *draw.sample(range(len(good)), 12)}
        for place in sorted(places):
            changed = bytearray(good)
            changed[place] ^= 1 << draw.randrange(8)
            file.write_bytes(bytes(changed))
            assert checkpoints.load({"extra": None}) == 1, (file.name, place)
        file.write_bytes(good[:-1])
        assert checkpoints.load({"extra": None}) == 1, file.name
        file.write_bytes(good)
    assert checkpoints.load(state) == 2
    assert same_state(saved(state), before)


# What fails changes nothing


def differently(part: str, run: Training) -> dict[str, Any]:
    """Another training, one part of whose state does not fit."""
    if part == "model":
        run.model.out = nn.Linear(6, 7)
    elif part == "optimizer":
        run.opt.inner.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    state = run.state(last=collections.OrderedDict())

    class Stubborn:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if state:
                raise KeyError("nothing fits")

    return state | {"last": Stubborn()} if part == "last" else state


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("part", ["model", "optimizer", "last"])
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path, format_name, part):
    """Not even the objects that were loaded before the one that does not fit."""
    checkpoints = st.Checkpoints(tmp_path, format=format_name)
    checkpoints.save(3, Training().train(3).state(last={"x": 1}))
    state = differently(part, Training(seed=1).train(2))
    before = saved(state)
    with pytest.raises(
        CheckpointError, match=rf"(?s)step-000000003 does not fit '{part}': .*Nothing was changed"
    ):
        checkpoints.load(state)
    assert same_state(saved(state), before)


def test_what_is_put_back_has_the_versions_of_its_modules(monkeypatch):
    """Batch norm, for one, reads older state dicts in another way."""
    model, seen = nn.BatchNorm1d(2), []
    monkeypatch.setattr(model, "load_state_dict", lambda state: seen.append(state._metadata))
    loading = Loading({"m": model}, {"m": nn.BatchNorm1d(2).state_dict()}, "here")
    loading.load()
    loading.undo()
    assert seen == [{"": {"version": 2}}] * 2


def test_an_interrupt_of_a_load_changes_all_or_nothing(tmp_path):
    checkpoints = st.Checkpoints(tmp_path)
    checkpoints.save(3, Training().train(3).state())
    new = saved(Training().train(3).state())

    def loading() -> tuple[dict[str, Any], Any]:
        state = Training(seed=1).state()
        return state, lambda: checkpoints.load(state)

    inside = (
        str(ROOT / "stablenum_torch" / "_recovery"),
        str(Path(torch.__file__).parent / "nn" / "modules"),
    )
    state, load = loading()
    old, count = saved(state), len(executed_lines(load, inside))
    found = []
    for number in some(range(count), 30):
        state, load = loading()
        place = interrupted_at(number, load, inside=inside)
        assert place is not None
        found.append([same_state(saved(state), old), same_state(saved(state), new)])
        assert any(found[-1]), place
    assert [True, False] in found


def test_what_is_not_in_the_checkpoint_is_named(tmp_path):
    checkpoints = st.Checkpoints(tmp_path)
    run = Training().train(2)
    checkpoints.save(2, {"model": run.model, "n": 1})
    other = Training(seed=1)
    before = saved(other.state())
    with pytest.raises(CheckpointError, match="has no 'optimizer'; it has 'model', 'n'"):
        checkpoints.load(other.state())
    assert same_state(saved(other.state()), before)
    assert checkpoints.load({"model": other.model}) == 2, "a part may be loaded"
    assert same_state(other.model.state_dict(), run.model.state_dict())


def test_no_good_checkpoint_is_an_error_with_every_reason(tmp_path):
    checkpoints = st.Checkpoints(tmp_path)
    for step in (1, 2):
        (checkpoints.save(step, {"n": step}) / "state.pt").unlink()
    state = {"n": 0}
    with pytest.raises(CheckpointError, match="no checkpoint in") as caught:
        checkpoints.load(state)
    assert caught.value.reasons == {
        "step-000000001": "state.pt is missing",
        "step-000000002": "state.pt is missing",
    }
    assert state == {"n": 0}


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(
    ("value", "error"),
    [(np.ones(2), TypeError), (object(), TypeError), (torch.ones(2, device="meta"), ValueError)],
    ids=["numpy", "object", "meta"],
)
def test_trap_what_could_never_be_loaded_is_not_saved(tmp_path, format_name, value, error):
    """torch.save writes them, and torch.load(weights_only=True) fails when the run is to go on."""
    checkpoints = st.Checkpoints(tmp_path, format=format_name)
    checkpoints.save(1, {"x": {"y": torch.ones(1)}})
    with pytest.raises(error, match=r"x\.y"):
        checkpoints.save(2, {"x": {"y": value}})
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == ["step-000000001"]


@pytest.mark.parametrize("format_name", FORMATS)
def test_trap_a_function_is_named_and_is_a_type_error(tmp_path, format_name):
    with pytest.raises(TypeError, match=r"extra\.rate"):
        st.Checkpoints(tmp_path, format=format_name).save(1, {"extra": {"rate": lambda step: 1.0}})
    assert not [path for path in tmp_path.iterdir() if path.name != ".lock"]


def test_a_name_that_safetensors_would_take_for_a_complex_tensor_is_named(tmp_path):
    with pytest.raises(ValueError, match="x#complex"):
        st.Checkpoints(tmp_path, format="safetensors").save(1, {"x#complex": torch.ones(2, 2)})


def test_a_model_in_a_narrower_format_in_which_a_value_is_inf_does_not_fit(tmp_path):
    wide, narrow = nn.Linear(2, 1), nn.Linear(2, 1).half()
    checkpoints, before = st.Checkpoints(tmp_path), saved({"m": narrow})["m"]
    checkpoints.save(1, {"model": wide})
    assert checkpoints.load({"model": nn.Linear(2, 1).half()}) == 1
    nn.init.constant_(wide.weight, 1e5)
    checkpoints.save(2, {"model": wide})
    with pytest.raises(CheckpointError, match=r"model\.weight would be inf in float16") as caught:
        checkpoints.load({"model": narrow})
    assert list(caught.value.reasons) == ["step-000000002"]
    assert same_state(narrow.state_dict(), before)


def test_only_where_nothing_was_saved_has_the_error_no_reasons(tmp_path):
    """A program may start from the beginning then, and in no other case."""
    checkpoints = st.Checkpoints(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load({"model": nn.Linear(2, 1)})
    assert caught.value.reasons == {}
    checkpoints.save(1, {"model": nn.Linear(2, 1)})
    for state in ({"model": nn.Linear(3, 1)}, {"other": nn.Linear(2, 1)}):
        with pytest.raises(CheckpointError) as caught:
            checkpoints.load(state)
        assert list(caught.value.reasons) == ["step-000000001"]


def test_what_can_be_put_back_is_put_back_though_another_object_cannot():
    class Once:
        loads = 0

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loads += 1
            if self.loads > 1:
                raise RuntimeError("not again")

    model = nn.Linear(2, 1)
    before = saved({"m": model})["m"]
    objects = {"once": Once(), "n": 3, "m": model, "other": nn.Linear(3, 1)}
    values = {"once": {}, "n": 4, "m": nn.Linear(2, 1).state_dict(), "other": before}
    loading = Loading(objects, values, "here")
    with pytest.raises(CheckpointError, match="does not fit 'other'"):
        loading.load()
    with pytest.raises(RuntimeError, match="not again"):
        loading.undo()
    assert objects["n"] == 3
    assert same_state(model.state_dict(), before)


def test_a_layout_that_safetensors_does_not_have_is_named(tmp_path):
    checkpoints = st.Checkpoints(tmp_path, format="safetensors")
    with pytest.raises(
        ValueError, match=r"x must be a dense tensor .*torch.sparse_coo.*Use format=\"torch\""
    ):
        checkpoints.save(1, {"x": torch.eye(2).to_sparse()})


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk with 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("format_name", FORMATS)
def test_trap_a_full_disk_is_called_a_full_disk(small_disk, format_name, caplog):
    """torch says "unexpected pos", and torch.distributed.checkpoint raises what is not an Exception."""
    run = Training().train(2)
    checkpoints = st.Checkpoints(small_disk / "run", format=format_name)
    checkpoints.save(2, run.state())
    before = {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()}
    large = run.state(x=torch.ones(400_000), n=1)
    with pytest.raises(
        CheckpointError, match=r"step 3 could not be saved in .*(No space left|takes no more)"
    ):
        checkpoints.save(3, large)
    assert {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()} == before
    going_on = st.Checkpoints(small_disk / "run", format=format_name, on_error="go on")
    with caplog.at_level(logging.WARNING, "stablenum"):
        assert going_on.save(3, large) is None
    assert "step 3 could not be saved in" in caplog.text
    assert going_on.load(run.state()) == 2


# Processes that are killed


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("format_name", "times"),
    [
        ("torch", 10),
        *(pytest.param(name, 200, marks=pytest.mark.slow(reason="200 kills")) for name in FORMATS),
    ],
)
def test_a_process_killed_while_saving_leaves_a_good_checkpoint(tmp_path, format_name, times):
    command = [sys.executable, "-W", "ignore", "-m", "tests.torch.killing_program"]
    command += [str(tmp_path / "run"), format_name, str(times)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["writing"] >= times / 4


# Arguments


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match="format must be 'torch', 'safetensors' or 'dcp'; got 'npz'"):
        st.Checkpoints(tmp_path, format="npz")
    with pytest.raises(TypeError, match="folder must be a path; got int"):
        st.Checkpoints(3)
    with pytest.raises(TypeError, match="process_group must be"):
        st.Checkpoints(tmp_path, process_group="all")
    with pytest.raises(ValueError, match="keep must be"):
        st.Checkpoints(tmp_path, keep=0)
    for state in (nn.Linear(1, 1), [1], {1: 2}):
        with pytest.raises(TypeError, match="state must be a dict of objects and plain values, by name"):
            st.Checkpoints(tmp_path).save(1, state)


def test_a_package_that_is_missing_is_named_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"needs safetensors 0\.6 or newer: pip install"):
        st.Checkpoints(tmp_path, format="safetensors")


@pytest.mark.parametrize("format_name", FORMATS)
def test_confirming_and_keeping(tmp_path, format_name):
    checkpoints = st.Checkpoints(tmp_path, keep=2, format=format_name)
    for step in (1, 2, 3):
        checkpoints.save(step, {"n": step})
    checkpoints.save(4, {"n": 4}, confirmed=False)
    state = {"n": 0}
    assert (checkpoints.load(state), state) == (3, {"n": 3})
    checkpoints.confirm(4)
    assert (checkpoints.load(state), state) == (4, {"n": 4})
    assert checkpoints.steps() == [3, 4]
    assert checkpoints.load(state, step=3) == 3
    assert checkpoints.folder == tmp_path
