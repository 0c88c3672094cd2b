"""The page of ``stablenum report``: the numbers in it, its tables, and that nothing in a log can act."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from array import array
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from stablenum import Reason
from stablenum._support.outside_text import in_script
from stablenum.commands.report.page import as_html
from stablenum.commands.report.tables import (
    differences,
    rewinds_table,
    settings_table,
    skips_table,
    summary,
    worst_table,
)
from stablenum.commands.run_plots.page_data import plotted, plotted_run, seen
from stablenum.commands.run_plots.script import PARTS, asset
from stablenum.commands.run_plots.thresholds import thresholds
from stablenum.guard.readout import Worst
from stablenum.runlog.lines import Rewind, Update
from stablenum.runlog.reading import Run, read_run
from tests.report.logs import CLIP, begun, log_of, long_log, record

HOSTILE = "</script><img src=x onerror=alert(1)><!-- \" ' & \u2028 \ud800"


def run_of(path: Path, *args: Any, **kwargs: Any) -> Run:
    return read_run(log_of(path / "run.jsonl", *args, **kwargs))


def data(*runs: Run) -> dict[str, Any]:
    return json.loads(in_script(plotted([plotted_run(run) for run in runs])))


def column(stored: dict[str, Any], count: int) -> list[float]:
    if "base64" in stored:
        return list(array("f", b64decode(stored["base64"])))
    ends = [*stored["at"][1:], count]
    pairs = zip(stored["at"], ends, stored["values"], strict=True)
    return [math.nan if v is None else v for start, end, v in pairs for _ in range(start, end)]


# --- data --------------------------------------------------------------------------------------------------


def test_the_page_has_every_step(tmp_path):
    run = read_run(long_log(tmp_path / "run.jsonl", 5000))
    (stored,) = data(run)["runs"]
    assert (stored["count"], stored["steps"]) == (5000, {"from": 0})
    for name, values in (("loss", run.loss), ("norm", run.grad_norm), ("scale", run.loss_scale)):
        assert column(stored[name], 5000) == pytest.approx(values, rel=1e-7, nan_ok=True)
    assert list(b64decode(stored["reason"])) == run.reason
    assert list(array("i", b64decode(stored["worst"]))) == run.worst
    assert stored["names"] == list(run.names)
    assert len(stored["updates"]["steps"]) == 78


def test_what_hardly_changes_takes_little_room(tmp_path):
    run = read_run(long_log(tmp_path / "run.jsonl", 5000))
    (stored,) = data(run)["runs"]
    assert stored["threshold"] == {"at": [0], "values": [1.0]}
    assert len(stored["scale"]["at"]) < 20


def test_what_is_not_finite_or_beyond_float32(tmp_path):
    rows = [
        record(i, loss=x, reason=Reason.NONFINITE_LOSS)
        for i, x in enumerate((math.nan, math.inf, -1e300, 1.0))
    ]
    (stored,) = data(run_of(tmp_path, rows))["runs"]
    assert column(stored["loss"], 4) == pytest.approx([math.nan, math.inf, -math.inf, 1.0], nan_ok=True)
    rows = [record(i, loss=math.inf, reason=Reason.NONFINITE_LOSS) for i in range(20)]
    (stored,) = data(run_of(tmp_path, rows))["runs"]
    assert stored["loss"] == {"at": [0], "values": [None]}


def test_a_loss_that_is_never_given_takes_no_room(tmp_path):
    (stored,) = data(run_of(tmp_path, [record(i, loss=math.nan) for i in range(100)]))["runs"]
    assert stored["loss"] == {"at": [0], "values": [None]}


def _beginning(**settings: Any) -> dict[str, Any]:
    return {"stablenum_log": 1, "settings": {"clip": [{"rule": "AutoClip"}], **settings}}


_MANY = 12_000
_STEP = {"grad_norm": 1, "clip_coefficient": 0.5, "reason": "OK"}


@pytest.mark.parametrize(
    "lines",
    [
        lambda i: (_beginning(), {"step": i, **_STEP}),
        lambda i: (_beginning(**{str(i): 1}), {"step": i, **_STEP}),
        lambda i: (_beginning(lr=i), {"step": 10**6 - i, **_STEP}),
        lambda i: (*[{"step": i, "update": 1, "largest": 1}] * 8, {"step": 10**6 - i, **_STEP}),
    ],
    ids=["starts", "settings", "returns", "updates"],
)
def test_the_work_grows_as_the_log_does(lines, tmp_path):
    path = tmp_path / "run.jsonl"
    plain = [_beginning(), *(line for i in range(_MANY) for line in lines(i))]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in plain))
    begun = time.process_time()
    run = read_run(path)
    as_html([run])
    list(differences([run, run]))
    # It takes a second; with work for each pair of lines, each case takes more than ten times as long.
    assert time.process_time() - begun < 4


def test_steps_with_gaps_and_none_at_all(tmp_path):
    (stored,) = data(run_of(tmp_path, [record(i) for i in (3, 4, 9)]))["runs"]
    assert list(array("i", b64decode(stored["steps"]["base64"]))) == [3, 4, 9]
    (stored,) = data(read_run(begun(tmp_path / "none.jsonl").path))["runs"]
    assert stored["count"] == 0


def test_restarts_and_rewinds_are_told(tmp_path):
    path = log_of(tmp_path / "run.jsonl", [record(i) for i in range(10)])
    file = begun(path)
    file.write([record(i, loss=1.0) for i in range(8, 12)])
    file.write([record(i, loss=0.5) for i in range(9, 12)])
    (stored,) = data(read_run(path))["runs"]
    assert stored["starts"] == [
        {"step": 8, "what": "started again"},
        {"step": 9, "what": "went back to this step"},
    ]


def went_back(path: Path) -> Run:
    """Steps 6 to 9 are undone, of which 8 and 9 were skipped; then 7 is undone again."""
    bad = {
        "reason": Reason.NONFINITE_LOSS,
        "loss": math.nan,
        "grad_norm": math.nan,
        "worst": Worst(1, "head"),
    }
    file = begun(path)
    file.write([record(i, **(bad if i >= 8 else {})) for i in range(10)])
    file.write([record(i, loss=1.0) for i in (6, 7)])
    file.write([record(i, loss=0.5) for i in range(7, 12)])
    return read_run(path)


def test_steps_that_were_undone_are_in_the_page(tmp_path):
    run = went_back(tmp_path / "run.jsonl")
    (stored,) = data(run)["runs"]
    undone = stored["undone"]
    assert undone["count"] == 4
    assert list(array("i", b64decode(undone["steps"]))) == [6, 7, 8, 9]
    assert column(undone["loss"], 4) == pytest.approx([2.0, 1.0, math.nan, math.nan], nan_ok=True)
    assert list(b64decode(undone["reason"])) == [Reason.OK] * 2 + [Reason.NONFINITE_LOSS] * 2
    assert "5 steps undone by a rewind, of which 2 were skipped" in summary(run)
    assert "0 skipped" in summary(run)
    table = skips_table([run])
    assert '<tr class="undone"><td><code>NONFINITE_LOSS</code> (undone)</td>' in table
    assert '<td class="number">2</td><td class="number">8</td><td class="number">9</td>' in table
    assert "worst of skipped steps, also undone ones" in worst_table([run])
    assert "<code>head</code>" not in worst_table([run])


def test_a_parameter_is_named_for_steps_that_were_undone(tmp_path):
    file = begun(tmp_path / "run.jsonl")
    bad = record(9, reason=Reason.INF_GRADIENT, grad_norm=math.inf, worst=Worst(1, "head"))
    file.write([*(record(i) for i in range(9)), bad])
    file.write([record(i, loss=1.0) for i in range(7, 12)])
    text = text_of(worst_table([read_run(tmp_path / "run.jsonl")]))
    assert text.endswith("also undone ones blocks.0.attention.weight 100.0% 0 head 0.0% 1")


def test_no_parameter_is_blamed_for_a_step_whose_loss_was_bad(tmp_path):
    bad = [
        record(i, reason=reason)
        for i, reason in enumerate([Reason.NONFINITE_LOSS] * 3 + [Reason.INF_GRADIENT])
    ]
    run = run_of(tmp_path, bad)
    assert [worst >= 0 for worst in run.worst] == [True] * 4
    assert '<td class="number">1</td></tr>' in worst_table([run])


def test_steps_that_were_undone_by_a_restart_are_counted_by_themselves(tmp_path):
    path = log_of(tmp_path / "run.jsonl", [record(i) for i in range(10)])
    begun(path).write([record(9, loss=1.0)])
    assert "1 step undone by a restart, of which 0 were skipped" in summary(read_run(path))


WHY = Rewind("reported", 6, 9, HOSTILE, f"Attempt 1: {HOSTILE}")


def test_a_rewind_is_in_the_page_with_its_reason(tmp_path):
    file = begun(tmp_path / "run.jsonl")
    file.write([record(i) for i in range(10)])
    why = WHY._replace(seen="the median loss is 6.3", done="Attempt 2: batches 6 to 9 left out")
    file.go_back(why, [record(i) for i in range(6)])
    file.write([record(i) for i in range(12)])
    run = read_run(tmp_path / "run.jsonl")
    assert text_of(rewinds_table([run])) == (
        "from step to step symptom response 9 6 reported the median loss is 6.3. "
        "Attempt 2: batches 6 to 9 left out."
    )
    (stored,) = data(run)["runs"]
    said = "back from step 9 to step 6: the median loss is 6.3. Attempt 2: batches 6 to 9 left out"
    assert stored["rewinds"] == [{"first": 6, "last": 9, "text": said}]
    assert (stored["starts"], stored["undone"]["count"]) == ([], 4)
    assert "went back once" in summary(run)
    page = as_html([run])
    assert "<h2>Rewinds</h2>" in page
    assert 'Point at a <span class="band">grey band</span>' in page
    other = read_run(log_of(tmp_path / "other.jsonl", [record(0)]))
    assert "response run.jsonl 9 6 reported" in text_of(rewinds_table([other, run]))


def test_a_log_without_a_reason_is_shown_as_before(tmp_path):
    page = as_html([went_back(tmp_path / "run.jsonl")])
    assert "<h2>Rewinds</h2>" not in page
    assert "from step" not in page
    assert 'class="band"' not in page


def test_what_is_said_of_a_rewind_cannot_act(tmp_path):
    file = begun(tmp_path / "run.jsonl")
    file.write([record(i) for i in range(10)])
    file.go_back(WHY._replace(symptom=HOSTILE), [])
    page = as_html([read_run(tmp_path / "run.jsonl")])
    assert "<img" not in page
    assert page.count("<script") == 2


# --- thresholds --------------------------------------------------------------------------------------------


def clipped(rules: list[dict[str, Any]] | None) -> dict[str, Any]:
    return {"settings": None if rules is None else {"clip": rules}}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([CLIP], [1.0, 1.0, 1.0]),
        ([CLIP, CLIP | {"max_norm": 0.5}], [0.5] * 3),
        ([{"rule": "ClipByValue", "max_value": 0.1}, CLIP], [1.0] * 3),
        ([{"rule": "ZClip"}], [math.nan, 2.0, math.nan]),
        ([{"rule": "AutoClip"}, CLIP], [math.nan, 2.0, math.nan]),
        ([{"rule": "AdaGC"}], [math.nan] * 3),
        ([{"rule": "ClipByNorm", "max_norm": 1.0}, CLIP], [math.nan] * 3),
        ([{"rule": "ClipByValue", "max_value": 0.1}], [math.nan] * 3),
        ([], [math.nan] * 3),
        (None, [math.nan] * 3),
    ],
)
def test_the_threshold_of_a_step(tmp_path, rules, expected):
    rows = [record(0), record(1, grad_norm=8.0, clip_coefficient=0.25, reason=Reason.CLIPPED), record(2)]
    assert thresholds(run_of(tmp_path, rows, **clipped(rules))) == pytest.approx(expected, nan_ok=True)


def test_the_threshold_follows_the_settings(tmp_path):
    path = log_of(tmp_path / "run.jsonl", [record(i) for i in range(6)])
    begun(path, **clipped([CLIP | {"max_norm": 3.0}])).write([record(i, loss=9.0) for i in range(4, 7)])
    begun(path, **clipped([CLIP | {"max_norm": 7.0}])).write([record(i, loss=8.0) for i in range(2, 5)])
    assert thresholds(read_run(path)) == [1.0, 1.0, 7.0, 7.0, 7.0]


# --- tables ------------------------------------------------------------------------------------------------


def text_of(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def test_skips_are_counted_by_reason_with_a_remedy(tmp_path):
    rows = [record(i) for i in range(10)]
    for i in (2, 4, 8):
        rows[i] = record(i, grad_norm=math.inf, reason=Reason.INF_GRADIENT)
    rows[5] = record(5, loss=math.nan, reason=Reason.NONFINITE_LOSS)
    text = text_of(skips_table([run_of(tmp_path, rows)]))
    assert "INF_GRADIENT 3 2 8 the step was skipped: a gradient holds inf. nothing to do if" in text
    assert text.index("INF_GRADIENT") < text.index("NONFINITE_LOSS 1 5 5")
    assert "OK" not in text


def test_code_in_a_remedy_is_code(tmp_path):
    bad = record(0, loss=math.nan, reason=Reason.NONFINITE_LOSS)
    table = skips_table([run_of(tmp_path, [bad])])
    assert "<code>stablenum explain --strict SCRIPT</code>, or check the batch" in table
    assert "`" not in table


def test_a_run_without_skips_says_so(tmp_path):
    assert skips_table([run_of(tmp_path, [record(0)])]) == "<p>No step was skipped.</p>"


@pytest.mark.parametrize("table", [skips_table, rewinds_table])
def test_a_table_has_a_column_for_the_run_only_if_there_are_several(tmp_path, table):
    file = begun(tmp_path / "run.jsonl")
    file.write([record(i, reason=Reason.NAN_GRADIENT, applied=False) for i in range(9)])
    file.go_back(WHY, [record(i) for i in range(6)])
    run = read_run(tmp_path / "run.jsonl")
    assert "<th>run</th>" not in table([run])
    assert "<th>run</th>" in table([run, run])


def test_worst_parameters_are_shares_of_the_applied_steps(tmp_path):
    (tmp_path / "d").mkdir()
    rows = [record(i, worst=Worst(0, "a") if i % 4 else Worst(1, "b")) for i in range(8)]
    rows.append(record(8, worst=Worst(2, "c"), reason=Reason.NAN_GRADIENT, grad_norm=math.nan))
    rows.append(record(9, worst=Worst(0, "a"), reason=Reason.SPIKE_LOSS))  # of which no parameter is at fault
    text = text_of(worst_table([run_of(tmp_path, rows)]))
    assert text.endswith("a 75.0% 0 b 25.0% 0 c 0.0% 1")
    # One that is named only in steps of which no parameter is at fault has nothing to say.
    rows.append(record(10, worst=Worst(3, "d"), reason=Reason.NONFINITE_LOSS))
    assert text_of(worst_table([run_of(tmp_path / "d", rows)])).endswith("c 0.0% 1")
    nameless = run_of(tmp_path, [record(0, worst=Worst(-1, None))])
    nameless.names.clear()
    assert "No parameter is named" in worst_table([nameless])


def test_settings_that_differ_between_runs_are_marked(tmp_path):
    a = read_run(log_of(tmp_path / "a.jsonl", [record(0)]))
    b = read_run(log_of(tmp_path / "b.jsonl", [record(0)], optimizer={"class": "AdamW", "lr": 1.0}))
    c = read_run(log_of(tmp_path / "c.jsonl", [record(0)], settings=None, optimizer=None))
    rows = re.findall(r"<tr( class=\"differs\")?><th scope=\"row\">(.*?)</th>", settings_table([a, b]))
    assert [name for differs, name in rows if differs] == ["optimizer: lr"]
    assert "optimizer" in [name for _, name in rows]
    assert "not known" in text_of(settings_table([c]))


def differing(*optimizers: dict[str, Any], path: Path) -> list[str]:
    path.mkdir(exist_ok=True)
    logs = [log_of(path / f"{i}.jsonl", [record(0)], optimizer=o) for i, o in enumerate(optimizers)]
    table = settings_table([read_run(log) for log in logs])
    return re.findall(r"<tr class=\"differs\"><th scope=\"row\">(.*?)</th>", table)


def test_where_a_schedule_stands_is_no_difference_between_runs(tmp_path):
    first, resumed = ({"class": "AdamW", "lr": lr, "initial_lr": 3e-4} for lr in (3e-4, 1e-4))
    assert differing(first, resumed, path=tmp_path) == []
    fixed = {"class": "AdamW", "lr": 3e-4}
    assert differing(fixed, resumed, path=tmp_path / "fixed") == ["optimizer: initial_lr"]
    other = resumed | {"initial_lr": 1e-4}
    found = differing(first, other, path=tmp_path / "other")
    assert found == ["optimizer: lr", "optimizer: initial_lr"]


ONE_CYCLE = {"class": "AdamW", "max_momentum": 0.95, "base_momentum": 0.85}


@pytest.mark.parametrize(
    ("began", "moved", "other"),
    [
        ({"betas": [0.95, 0.999]}, {"betas": [0.897, 0.999]}, {"betas": [0.897, 0.99]}),
        ({"momentum": 0.95}, {"momentum": 0.897}, {"momentum": 0.9, "max_momentum": 0.9}),
        (
            {"betas": {"by_group": [[0.95, 0.999], [0.9, 0.99]]}, "max_momentum": {"by_group": [0.95, 0.9]}},
            {"betas": {"by_group": [[0.9, 0.999], [0.85, 0.99]]}, "max_momentum": {"by_group": [0.95, 0.9]}},
            {"betas": {"by_group": [[0.9, 0.999], [0.85, 0.9]]}, "max_momentum": {"by_group": [0.95, 0.9]}},
        ),
        (
            {"betas": {"by_group": [[0.95, 0.999], [0.95, 0.9]]}},
            {"betas": {"by_group": [[0.9, 0.999], [0.9, 0.9]]}},
            {"betas": [0.9, 0.999]},
        ),
        (
            {"betas": [0.9, 0.999], "max_momentum": {"by_group": [0.9, None]}},
            {"betas": {"by_group": [[0.8, 0.999], [0.9, 0.999]]}, "max_momentum": {"by_group": [0.9, None]}},
            {"betas": [0.8, 0.999], "max_momentum": {"by_group": [0.9, None]}},
        ),
    ],
)
def test_where_a_cycle_of_the_momentum_stands_is_no_difference(tmp_path, began, moved, other):
    assert differing(ONE_CYCLE | began, ONE_CYCLE | moved, path=tmp_path) == []
    assert differing(ONE_CYCLE | began, ONE_CYCLE | other, path=tmp_path / "other") != []


def test_a_cycle_is_another_setting_than_none(tmp_path):
    fixed = {"class": "AdamW", "betas": [0.95, 0.999]}
    found = differing(fixed, ONE_CYCLE | {"betas": [0.9, 0.999]}, path=tmp_path)
    assert found == ["optimizer: max_momentum", "optimizer: base_momentum"]


def settings_of(run: Run) -> dict[str, str]:
    rows = re.findall(r'<th scope="row">(.*?)</th><td><code>(.*?)</code>', settings_table([run]))
    return dict(rows)


def test_a_run_that_was_started_again_shows_the_settings_with_which_it_began(tmp_path):
    first = ONE_CYCLE | {"lr": 1e-4, "initial_lr": 1e-4, "betas": [0.95, 0.999]}
    later = first | {"lr": 2e-3, "betas": [0.9, 0.999]}
    run_of(tmp_path, [record(0), record(1)], optimizer=first)
    settings = settings_of(run_of(tmp_path, [record(2)], optimizer=later))
    assert settings["optimizer: lr"] == "0.0001"
    assert settings["optimizer: betas"] == "0.95, 0.999"


def test_a_setting_that_a_restart_changed_is_shown_as_it_was_and_became(tmp_path):
    path = log_of(tmp_path / "a.jsonl", [record(0), record(1)])
    lower = {"clip": [CLIP | {"max_norm": 0.5}], "on_nonfinite": "skip"}
    begun(path, settings=lower, optimizer={"class": "AdamW", "lr": 1e-4}).write([record(2)])
    run, other = read_run(path), read_run(log_of(tmp_path / "b.jsonl", [record(0)]))
    settings = settings_of(run)
    assert settings["clip"] == "ClipByGlobalNorm(max_norm=1), then ClipByGlobalNorm(max_norm=0.5)"
    assert settings["optimizer: lr"] == "0.0003, then 0.0001"
    assert settings["optimizer"] == "AdamW"
    differ = re.findall(r"<tr class=\"differs\"><th scope=\"row\">(.*?)</th>", settings_table([run, other]))
    assert differ == ["clip", "optimizer: lr"]


def test_settings_of_steps_that_were_all_undone_are_not_shown(tmp_path):
    path = log_of(tmp_path / "a.jsonl", [record(0), record(1)], optimizer={"class": "SGD", "lr": 9.0})
    begun(path).write([record(0, loss=1.0)])
    assert settings_of(read_run(path))["optimizer: lr"] == "0.0003"
    assert "optimizer: momentum" not in settings_of(read_run(path))


def test_a_setting_that_a_restart_added_or_removed(tmp_path):
    path = log_of(tmp_path / "a.jsonl", [record(0)], optimizer={"class": "SGD", "momentum": 0.9})
    begun(path, optimizer={"class": "SGD", "nesterov": True}).write([record(1)])
    settings = settings_of(read_run(path))
    assert settings["optimizer: momentum"] == "0.9, then -"
    assert settings["optimizer: nesterov"] == "-, then True"


def by_group(*values: Any) -> dict[str, Any]:
    return {"class": "AdamW", "lr": {"by_group": list(values)}}


def test_a_difference_in_a_later_parameter_group_is_marked(tmp_path):
    for name, other in (("groups", by_group(3e-3, 3e-4)), ("one", {"class": "AdamW", "lr": 3e-3})):
        (tmp_path / name).mkdir()
        found = differing(by_group(3e-3, 3e-7), other, path=tmp_path / name)
        assert found == ["optimizer: lr"]


def test_settings_by_group_name_the_groups(tmp_path):
    run = run_of(tmp_path, [record(0)], optimizer=by_group(3e-3, 3e-3, 1e-3, None, 3e-3))
    text = text_of(settings_table([run]))
    assert "0.003 (groups 0 to 1); 0.001 (group 2); None (group 3); 0.003 (group 4)" in text
    (tmp_path / "b").mkdir()
    betas = run_of(tmp_path / "b", [record(0)], optimizer=by_group([0.9, 0.999], [0.8, 0.9]))
    assert "0.9, 0.999 (group 0); 0.8, 0.9 (group 1)" in text_of(settings_table([betas]))


def test_numbers_among_the_settings_are_rounded(tmp_path):
    optimizer = {"class": "AdamW", "lr": 3 * 1e-4, "betas": [0.9, 1 - 0.001], "eps": 1e-8, "fused": True}
    settings = {"clip": [CLIP | {"max_norm": 0.1 + 0.2}], "max_scale": 2.0**24}
    run = run_of(tmp_path, [record(0)], optimizer=optimizer, settings=settings)
    values = re.findall(r"<td><code>(.*?)</code></td>", settings_table([run]))
    assert values[:6] == [
        "ClipByGlobalNorm(max_norm=0.3)",
        "16777216",
        "AdamW",
        "0.0003",
        "0.9, 0.999",
        "1e-08",
    ]
    assert "True" in values


def test_a_summary_says_what_happened(tmp_path):
    path = log_of(tmp_path / "run.jsonl", [record(0), record(1)])
    assert re.match(r"2 steps · 0 skipped · started 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC · torch$", said(path))
    with path.open("a") as file:
        file.write("broken\n")
    begun(path).write([record(i) for i in range(1, 5)])
    moment = r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    again = (
        f"· started {moment} · started again once, at {moment} · torch · 1 line of the log cannot be read$"
    )
    assert re.search(again, said(path))


def test_a_summary_has_the_times_of_the_first_and_the_last_start(tmp_path):
    path = log_of(tmp_path / "run.jsonl", [record(0), record(1)])
    for step in (2, 3):
        begun(path).write([record(step)])
    days = iter(("2031-01-01", "2031-01-02", "2031-01-03"))
    path.write_text(re.sub(r'(?<="started":")[\d-]+', lambda _: next(days), path.read_text()))
    assert re.search(
        r"started 2031-01-01 \S+ UTC · started again 2 times, last at 2031-01-03 \S+ UTC · torch", said(path)
    )


def test_the_page_says_what_a_dashed_line_marks(tmp_path):
    path = log_of(tmp_path / "run.jsonl", [record(0), record(1)])
    assert "dashed line" not in as_html([read_run(path)])
    begun(path).write([record(2)])
    assert "steps that came out as before are not written twice" in as_html([read_run(path)])


def said(path: Path) -> str:
    return summary(read_run(path)).replace("&middot;", "·")


# --- the page ----------------------------------------------------------------------------------------------


def test_nothing_from_a_log_can_act(tmp_path):
    path = log_of(
        tmp_path / "run.jsonl",
        [record(0, worst=Worst(0, HOSTILE))],
        [Update(0, 0.1, 0.1, HOSTILE)],
        settings={"clip": [{"rule": HOSTILE}], HOSTILE: HOSTILE},
        versions={HOSTILE: HOSTILE},
        optimizer={HOSTILE: HOSTILE},
        framework=HOSTILE,
    )
    run = read_run(path)
    run.name = HOSTILE
    html = as_html([run])
    assert "<img" not in html
    assert html.count("</script>") == 2
    assert html.count("<script") == 2
    (stored,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert json.loads(stored)["runs"][0]["name"].startswith("</script>")


def test_the_page_holds_the_licence_of_the_library_that_draws(tmp_path):
    html = as_html([run_of(tmp_path, [record(0)])])
    assert "The MIT License (MIT)" in html
    assert "Copyright (c) 2022 Leon Sorokin" in html
    assert "uPlot 1.6.32" in html


def test_the_library_that_draws_is_as_it_was_released():
    _, code = asset("uplot.js").split("*/\n", 1)
    digest = hashlib.sha256(code.encode()).hexdigest()
    assert digest == "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"  # uPlot 1.6.32


def test_the_policy_of_the_page_allows_its_own_script_alone(tmp_path):
    html = as_html([run_of(tmp_path, [record(0)])])
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', html)
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert not re.findall(r'(?:src|href)="(?!data:|https://github.com/leeoniya/uPlot")', html)


def test_the_own_script_is_left_out_of_no_page(tmp_path):
    html = as_html([run_of(tmp_path, [record(0)])])
    for name in PARTS:
        assert asset(f"{name}.js") in html


def test_of_very_many_steps_those_are_drawn_that_an_eye_can_tell_apart(tmp_path):
    run = read_run(log_of(tmp_path / "run.jsonl", [record(0)]))
    count, odd = 300_000, (7, 123_456, 299_998)
    for name, usual in (("loss", 2.0), ("grad_norm", 0.5), ("loss_scale", 1.0), ("clip_coefficient", 1.0)):
        setattr(run, name, [usual] * count)
    run.steps, run.reason, run.worst = list(range(count)), [Reason.OK] * count, [0] * count
    for i, value in zip(odd, (9.0, -9.0, math.nan), strict=True):
        run.loss[i] = value
    run.reason[200_000] = Reason.INF_GRADIENT
    drawn = list(seen(run.loss, run.grad_norm, run.loss_scale, skipped=run.skipped))
    assert {0, *odd[:2], 200_000, count - 1} <= set(drawn)
    assert len(drawn) < 40_000
    page = as_html([run])
    assert "not every step is drawn" in page
    assert "300,000 steps, 1 skipped" in page.replace("&middot;", ",").replace(" ,", ",")
    assert len(page) < 2_000_000
