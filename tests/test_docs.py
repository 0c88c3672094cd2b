"""The examples on the documentation pages run, and generated figures and tables show what was measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zlib
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

import stablenum.losses
import stablenum.numerics
from stablenum import GuardConfig, cli
from stablenum.commands.compare.backends import BACKENDS
from stablenum.commands.compare.builtin import SCENARIOS
from stablenum.commands.compare.runner import why_left_out
from stablenum.commands.index import COMMANDS
from stablenum.diagnosis import Cause
from stablenum.rules.clipping import CLIP_RULES
from stablenum.rules.loss_scale import LOSS_SCALES
from stablenum.rules.spikes import MeanStdSpikeGuard, SpikeGuard
from tests.selection import REPEATS, one_in_three, only

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RULES = sorted((DOCS / "rules").glob("*.md"))
RECIPES = sorted((DOCS / "recipes").glob("*.md"))
API = sorted((DOCS / "api").glob("*.md"))
PAGES = sorted(DOCS.glob("*.md")) + RULES + RECIPES


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


# The programs of migrate.md need a model and batches: tests/partners/test_migration.py runs them.
BLOCKS = {
    f"{page.relative_to(DOCS)}:{i}": block
    for page in PAGES
    if page.name != "migrate.md"
    for i, block in enumerate(blocks(page, "python"))
}

ON_TWO_RANKS = {
    "distributed-replicas.md:0",
    "recipes/ddp.md:0",
    "recipes/fsdp2.md:0",
}  # programs for torchrun


@pytest.mark.parametrize("name", BLOCKS)
def test_an_example_needs_no_scrolling(name):
    assert max(map(len, BLOCKS[name].splitlines())) <= 86


def test_the_pages_have_examples():
    with_examples = {name.partition(":")[0] for name in BLOCKS}
    rules = {str(page.relative_to(DOCS)) for page in RULES}
    pages = {
        "audit.md",
        "checkpoints.md",
        "checkup.md",
        "diagnosis.md",
        "diff-reference.md",
        "diff.md",
        "distributed-jax.md",
        "distributed-replicas.md",
        "distributed.md",
        "faq.md",
        "file-formats.md",
        "gpu.md",
        "how-it-works.md",
        "index.md",
        "install.md",
        "jax.md",
        "nan-and-cure.md",
        "numerics.md",
        "porting.md",
        "precision.md",
        "pytorch.md",
        "ranges.md",
        "recover.md",
        "report.md",
        "same-decisions.md",
        "settings.md",
        "thread-safety.md",
        "tutorial.md",
        "verify.md",
    }
    recipes = {str(page.relative_to(DOCS)) for page in RECIPES if page.name != "index.md"}
    assert with_examples == pages | rules | recipes
    index = (DOCS / "recipes" / "index.md").read_text(encoding="utf-8")
    listed = {page for page in RECIPES if f"]({page.name})" in index and f"\n{page.stem}\n" in index}
    assert {str(page.relative_to(DOCS)) for page in listed} == recipes


@pytest.mark.parametrize("page", [page for page in RECIPES if page.name != "index.md"], ids=lambda p: p.stem)
def test_a_recipe_begins_with_the_lines_that_do_it_and_they_are_in_its_programs(page):
    text = page.read_text(encoding="utf-8")
    assert -1 < text.find("\n```py\n") < text.find("\n```python\n")
    programs = {line.strip() for block in blocks(page, "python") for line in block.splitlines()}
    for block in blocks(page, "py"):
        lines = [line.strip() for line in block.splitlines()]
        assert len(lines) <= 8
        assert [line for line in lines if line and line not in programs] == []


@pytest.mark.parametrize("rule", [*CLIP_RULES, *LOSS_SCALES, SpikeGuard, MeanStdSpikeGuard])
def test_every_rule_has_a_page_and_is_in_the_reference(rule):
    name = re.compile(rf"\b{rule.__name__}\b")
    assert any(name.search(page.read_text(encoding="utf-8")) for page in RULES if page.name != "index.md")
    assert f"stablenum.{rule.__name__}\n" in (DOCS / "api" / "core.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("backends", [("numpy", "torch"), pytest.param(("torch", "jax-jit"), marks=REPEATS)])
def test_the_scenario_files_on_the_page_run(tmp_path, backends):
    toml = blocks(DOCS / "compare.md", "toml")
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(toml), encoding="utf-8")
    names = re.findall(r'^name = "(.*)"', "\n".join(toml), re.M)
    assert names == ["mine", "ruled", "spiky", "hurt"]
    asked = [part for name in names for part in ("--scenario", name)]
    options = ["--config", str(file), *asked, *(part for name in backends for part in ("--backend", name))]
    result = CliRunner().invoke(cli.app("compare", "explain"), ["compare", *options])
    assert result.exit_code == 0, result.output


# What torch.distributed.checkpoint says in one process, Lightning without worker processes and in a folder of
# an earlier run, the Trainer on a machine without a GPU, and transformers about old names in TRL.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
@pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.*` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
@pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated")
@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in ON_TWO_RANKS])
def test_the_example_runs(name):
    exec(compile(BLOCKS[name], "<documentation>", "exec"), {"__name__": "example"})


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ON_TWO_RANKS))
def test_the_example_runs_on_two_ranks(name, tmp_path):
    (tmp_path / "train.py").write_text(BLOCKS[name], encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*torchrun, str(tmp_path / "train.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "page", [page for page in RULES if page.name != "index.md"], ids=lambda page: page.stem
)
def test_the_toml_of_a_rule_equals_its_python(page):
    example: dict[str, object] = {"__name__": "example"}
    (python,), (toml,) = blocks(page, "python"), blocks(page, "toml")
    exec(compile(python, "<documentation>", "exec"), example)
    assert GuardConfig.from_toml(toml) == example["config"]


def test_the_toml_of_the_guide_is_a_config():
    (toml,) = blocks(DOCS / "rules" / "index.md", "toml")
    config = GuardConfig.from_toml(toml)
    assert [type(rule).__name__ for rule in config.clip] == ["AdaptiveGradClip", "ClipByGlobalNorm"]
    assert config.spike == SpikeGuard()


@pytest.fixture
def made_with(monkeypatch):
    """Imports a module of the docs folder."""
    monkeypatch.syspath_prepend(str(DOCS))

    def load(name: str) -> ModuleType:
        return __import__(name, fromlist=["__all__"])

    return load


def test_every_page_includes_its_generated_files(made_with):
    figures, tables, poison = (made_with(name) for name in ("figures", "tables", "poison"))
    pages = {page.stem: page.read_text(encoding="utf-8") for page in RULES}
    recover = (DOCS / "recover.md").read_text(encoding="utf-8")
    assert "{image} _build/generated/figures/recovery.svg" in recover
    assert "{include} _build/generated/figures/recovery.md" in recover
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert "(_build/generated/figures/two-runs.svg)" in index
    assert "{include} _build/generated/figures/two-runs.md" in index
    of_rules = figures.FIGURES.keys() - {"recovery", "two-runs"}
    assert set(pages) - {"index"} == {name.removesuffix("-constant") for name in of_rules}
    for name in of_rules:
        text = pages[name.removesuffix("-constant")]
        assert f"(../_build/generated/figures/{name}.svg)" in text
        assert f"{{include}} ../_build/generated/figures/{name}.md" in text
    for kind, names in (("cost", tables.PAGES), ("state", tables.STATES), ("poison", poison.CASES)):
        for name in names:
            assert f"{{include}} ../_build/generated/{kind}-{name}.md" in pages[name]


def test_a_figure_is_drawn_and_its_caption_counts(made_with, tmp_path):
    spikes, style = made_with("figures.spikes"), made_with("figures.style")
    figure, caption = spikes.constant_loss()
    style.save(figure, tmp_path / "figure.svg")
    assert ElementTree.parse(tmp_path / "figure.svg").getroot().tag.endswith("svg")
    assert "`SpikeGuard` skipped 0 steps, `MeanStdSpikeGuard` skipped 6 steps" in caption


def test_the_rule_tables_need_a_measurement_of_every_rule(made_with, tmp_path):
    tables = made_with("tables")
    with pytest.raises(FileNotFoundError, match="python -m benchmarks rules"):
        tables.write_rule_tables(tmp_path / "rules.json", tmp_path)
    report = json.loads((ROOT / "benchmarks" / "results" / "rules.json").read_text(encoding="utf-8"))
    tables.write_rule_tables(ROOT / "benchmarks" / "results" / "rules.json", tmp_path)
    figure = f"{report['decide']['ZClip']['torch_us']:.0f}"
    assert f"| {figure} |" in (tmp_path / "cost-zclip.md").read_text(encoding="utf-8")
    assert "| `far` | (n,) | int32 |" in (tmp_path / "state-adagc.md").read_text(encoding="utf-8")
    row = report["detection"]["constant"]["SpikeGuard"]
    assert f"| {row['detected'] / row['planted']:.0%} of {row['planted']} |" in (
        tmp_path / "detection.md"
    ).read_text(encoding="utf-8")
    del report["decide"]["ZClip"]
    (tmp_path / "rules.json").write_text(json.dumps(report), encoding="utf-8")
    with pytest.raises(KeyError, match="ZClip"):
        tables.write_rule_tables(tmp_path / "rules.json", tmp_path)


def test_the_table_of_the_demo_is_that_of_the_built_in_scenarios():
    page = (DOCS / "compare.md").read_text(encoding="utf-8")
    table = page[page.index("## What `make conformance` prints") :]
    rows = re.findall(r"^(\S+) +\w+ +(\w+) +(\d+) +(\d+) +(\d)/6 +yes", table, re.MULTILINE)
    assert [name for name, *_ in rows] == list(SCENARIOS)
    for name, guarded, steps, skipped, backends in rows:
        expected = SCENARIOS[name].expected
        every = list(BACKENDS.values())
        able = [b for b in every if why_left_out(SCENARIOS[name], b, every, brief=True) is None]
        assert int(backends) == len(able)
        assert guarded == expected.guarded
        assert expected.skips is None or int(skipped) == expected.skips
        assert int(steps) <= SCENARIOS[name].steps or expected.rewinds  # steps are made again


def test_every_page_is_in_the_sidebar_once():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"^```{toctree}\n:hidden:\n:caption: (.+)\n\n((?:.+\n)+)```", index, re.M)
    captions = [caption for caption, _ in trees]
    assert captions == [
        *("Start", "Tutorials", "How-to", "Migrate", "Rules", "Safe functions", "Diagnose", "Precision"),
        *("Compare and port", "Distributed", "Recover", "Explanation", "Reference", "Project"),
    ]
    listed = [page for _, pages in trees for page in pages.split()]
    written = {page.stem for page in DOCS.glob("*.md")} | {f"api/{page.stem}" for page in API}
    written |= {f"stories/{page.stem}" for page in DOCS.glob("stories/*.ipynb")}
    assert sorted(listed) == sorted((written - {"index"}) | {"recipes/index", "rules/index"})


def test_the_page_of_the_command_has_every_option_and_exit_code(made_with, tmp_path):
    commands = made_with("commands")
    commands.write_commands(tmp_path)
    text = (tmp_path / "commands.md").read_text(encoding="utf-8")
    assert re.findall(r"^## `stablenum (\w+)`$", text, re.M) == list(COMMANDS)
    for option in ("--ignore NAME", "-m, --module", "--repro DIR", "--allow PATTERN", "--plot <path>"):
        assert f"| `{option}` |" in text
    assert "(with `--module`, the module's name)" in text
    assert "as in `--allow '*.mask'`" in text
    assert not re.search(r"--", re.sub(r"`[^`]*`|```.*?```|^\| ---.*?$", "", text, flags=re.M | re.S))
    assert "| `--steps <int range>` | Record this many training steps. \\[default: 1; x>=1\\] |" in text
    page = (DOCS / "command-line.md").read_text(encoding="utf-8")
    assert "{include} _build/generated/commands.md" in page
    exits = re.search(r"^## Exit codes\n(.*?)^## |\Z", page + "\n## ", re.M | re.S)[1]
    assert set(re.findall(r"^\| `(\w+)` \|", exits, re.M)) == set(COMMANDS)


def test_the_page_on_installing_names_the_versions_that_are_claimed():
    page = (DOCS / "install.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    claimed = [need for extra in ("torch", "jax") for need in project["optional-dependencies"][extra]]
    for need in claimed:
        assert re.search(rf"\b{re.escape(need.partition('>=')[2])}\b", page), need
    for file in ("constraints-lowest.txt", "constraints.txt"):
        pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / file).read_text(encoding="utf-8"), re.M))
        row = next(line for line in page.splitlines() if f"`{file}`" in line and line.startswith("|"))
        assert [cell.strip() for cell in row.split("|")[3:-1]] == [
            pins[name] for name in ("torch", "jax", "optax", "numpy")
        ]


def test_the_short_table_of_costs_is_measured(made_with, tmp_path):
    short = made_with("short_costs")
    short.write_short_costs(ROOT / "benchmarks" / "results", tmp_path)
    text = (tmp_path / "short-costs.md").read_text(encoding="utf-8")
    report = json.loads((ROOT / "benchmarks" / "results" / "gpu-h100.json").read_text(encoding="utf-8"))
    row = next(row for row in report["rows"] if row["name"] == "torch adamw fused 38M/108 float32")
    bare = f"{row['variants']['bare']['median_ms']:.2f}"
    peer, ours = (f"{row['variants'][name]['ratio_to_bare']:.2f}" for name in ("scaler", "fold"))
    assert f"| PyTorch, H100, 38 M | {bare} | {peer} (GradScaler + clip) | {ours} |" in text
    assert len(text.splitlines()) == 9
    with pytest.raises(FileNotFoundError, match="python -m benchmarks steps"):
        short.write_short_costs(tmp_path, tmp_path)


def test_links_in_the_files_of_the_root_lead_to_pages(made_with, tmp_path):
    root_files = made_with("root_files")
    root_files.write_root_files(ROOT, tmp_path)
    for page in root_files.PAGES:
        text = (tmp_path / f"{page}.md").read_text(encoding="utf-8")
        links = re.findall(r"\]\((?!http)([^)#]+)", text)
        assert all((DOCS / link).exists() for link in links), page
        assert f"{{include}} _build/generated/{page}.md" in (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert "](checkpoints.md)" in (tmp_path / "changelog.md").read_text(encoding="utf-8")


def test_inventories_have_the_form_that_sphinx_reads(made_with, tmp_path):
    inventories = made_with("inventories")
    inventories.write_inventories(tmp_path)
    assert set(inventories.mapping()) == set(inventories.PARTNERS)
    lines = []
    for _, file in inventories.mapping().values():
        *head, packed = (tmp_path / file).read_bytes().split(b"\n", 4)
        assert head[0] == b"# Sphinx inventory version 2"
        assert b"zlib" in head[3]
        lines += zlib.decompress(packed).decode().splitlines()
    assert "torch.optim.Optimizer py:class 1 optim.html#torch.optim.Optimizer -" in lines
    assert "jax.jit py:function 1 _autosummary/jax.jit.html#jax.jit -" in lines


def test_the_effect_of_a_bad_value_is_determined_by_comparing_decisions(made_with):
    poison = made_with("poison")
    ((_, config, name, watch),) = poison.CASES["zclip"]
    stream = made_with("benchmarks.recorded").load(name)
    found = dict(zip(poison.POISONS, poison.aftermaths(config, watch, stream, 100), strict=True))
    assert found["NaN"] == ("skipped, `NAN_GRADIENT`", "no trace in the state")
    assert found["all gradients 0"] == ("applied, `OK`", "no trace in the state")
    verdict, afterwards = found["1e30"]
    assert verdict == "applied, `CLIPPED`"
    assert afterwards.startswith("the same decisions (factors within 0.")


# The cause that each program of the gallery is meant to show.
GALLERY = {
    "log_of_softmax": Cause.DOMAIN,
    "where_trap": Cause.WHERE_TRAP,
    "norm_at_zero": Cause.BOUNDARY_DERIVATIVE,
    "masked_row": Cause.MASK,
    "autocast_overflow": Cause.LOW_PRECISION_OVERFLOW,
    "loss_scale": Cause.LOSS_SCALE,
    "custom_backward": Cause.DOMAIN,
    "labels": Cause.LABELS,
    "batch_nan": Cause.BATCH,
    "poisoned_adam": Cause.OPTIMIZER_STATE,
    "causal_mask": Cause.NOTHING_WRONG,
    "jax_log_of_softmax": Cause.DOMAIN,
    "jax_where_trap": Cause.WHERE_TRAP,
    "jax_scan": Cause.OVERFLOW,
    "jax_float16": Cause.LOW_PRECISION_OVERFLOW,
    "jax_data": Cause.BATCH,
    "jax_bound": Cause.NOTHING_WRONG,
}


def test_every_program_of_the_gallery_is_on_its_page(made_with):
    gallery = made_with("gallery")
    listed = [name for names in gallery.FRAMEWORKS.values() for name in names]
    assert listed == list(GALLERY)
    files = {path.name for path in gallery.FAILURES.glob("*.py")}
    assert files == {f"{name}.py" for name in listed}
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    assert all(
        f"{{include}} _build/generated/gallery-{framework}.md" in page for framework in gallery.FRAMEWORKS
    )
    page = (DOCS / "diagnosis.md").read_text(encoding="utf-8")
    script, *arguments = gallery.EXPLAINED
    assert f"$ stablenum explain {script} -- {' '.join(arguments)}\n" in page
    assert "{include} _build/generated/explain.md" in page


def test_six_programs_are_on_their_page(made_with):
    programs = made_with("programs")
    page = (DOCS / "six-programs.md").read_text(encoding="utf-8")
    included = re.findall(r"{include} _build/generated/program-(\w+)\.md", page)
    assert included == list(programs.FOUND)
    assert {path.stem for path in programs.PROGRAMS.glob("*.py")} == set(included)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("log_of_sigmoid", "torch.log(p)"),
        ("large_weights", "nn.init.uniform_"),
        ("tiny_gradients", "*= 1e-50"),
        ("half_precision_steps", "torch.optim.Adam"),
        ("large_loss", "loss.backward()"),
        ("small_loss", ".half() / 1024"),
    ],
)
def test_what_is_found_in_a_program_is_what_its_page_says(made_with, name, code):
    programs = made_with("programs")
    text = programs.found_in(name)
    marked = re.search(r"^  > +\d+  (.*)$", text, re.MULTILINE)
    assert programs.FOUND[name][1] in text
    assert code in marked[1]


@pytest.mark.parametrize("name", GALLERY)
def test_a_program_of_the_gallery_shows_its_intended_failure(made_with, name):
    shown = made_with("gallery").shown(name)
    assert shown.output == str(shown.report)
    assert shown.report.verdict.cause is GALLERY[name]
    assert shown.report.ok == (GALLERY[name] is Cause.NOTHING_WRONG)
    if not shown.report.ok:
        line = int(re.match(rf"{name}\.py:(\d+): ", shown.output)[1])
        source = shown.source.splitlines()[line - shown.first_line].strip()
        marked = re.search(rf"^  > +{line}  (.*)$", shown.output, re.MULTILINE)
        assert marked is not None
        assert marked[1].strip() == source


@pytest.mark.slow
def test_the_command_on_the_page_finds_the_failing_line(made_with):
    text = " ".join(made_with("gallery").explained().split())
    assert "recorded in run 2 train.py:20: the derivative of sqrt gives NaN (backward)" in text


def test_the_tables_of_small_updates_are_measured(made_with):
    updates = made_with("updates")
    rows = {row[0]: [float(cell) for cell in row[1:]] for row in updates.thousand_rows()}
    plain, kahan, stochastic, masters = (rows[label] for label, *_ in updates.WAYS.values())
    assert plain == [0.0, 0.0]
    for found in (kahan, stochastic, masters):  # 0.1016 is the nearest that a bfloat16 weight can get
        assert max(abs(moved - 0.1) for moved in found) <= 0.002
    assert kahan == masters
    assert rows["exactly"] == [0.1, 0.1]
    labels = [row[0] for row in updates.digits_rows(steps=2)]
    assert labels == ["float32", *(label for label, *_ in updates.WAYS.values())]
    page = (DOCS / "precision.md").read_text(encoding="utf-8")
    assert all(f"{{include}} _build/generated/{name}.md" in page for name in ("updates", "updates-digits"))


def cures_and_cases():
    """``cures``, and each of its cases by a unique name."""
    sys.path.insert(0, str(DOCS))
    try:
        cures = __import__("cures")
    finally:
        sys.path.remove(str(DOCS))
    cases = [case for theme in cures.THEMES.values() for case in theme]
    return cures, {f"{case.name} {case.at}": case for case in cases}


CURES, CASES = cures_and_cases()


def test_every_function_and_every_loss_has_a_failing_line_on_the_page():
    functions, losses = set(stablenum.numerics.__all__), set(stablenum.losses.__all__)
    assert {case.name for case in CASES.values()} == functions | losses
    for theme, cases in CURES.THEMES.items():
        assert {case.name for case in cases} <= (losses if theme == "losses" else functions)
        page = (DOCS / "nan-and-cure.md").read_text(encoding="utf-8")
        assert f"{{include}} _build/generated/cures-{theme}.md" in page


# Half of the fixed third: each is measured in both frameworks, and JAX compiles for seconds.
@pytest.mark.parametrize("name", only([name for name in CASES if one_in_three(name)][1::2], CASES))
def test_one_line_on_the_page_fails_and_ours_agree(name):
    case = CASES[name]
    *theirs, in_torch, in_jax = CURES.measured(case)
    assert f".{case.name}(" in in_torch.written
    for ours in (in_torch, in_jax):
        assert not np.isnan(ours.value).any()
        assert np.isfinite(ours.gradient).all()
    for a, b in ((in_torch.value, in_jax.value), (in_torch.gradient, in_jax.gradient)):
        np.testing.assert_allclose(a, b, rtol=1e-3 if case.format == "float16" else 1e-6)
        assert CURES.short(a) == CURES.short(b)
    shown = (CURES.short(in_torch.value), CURES.short(in_torch.gradient))
    assert any((CURES.short(line.value), CURES.short(line.gradient)) != shown for line in theirs)


def test_the_numbers_of_a_table_are_short():
    numbers = {0.0: "0", 1e12: "1e12", -2.0612e-9: "-2.06e-9", 999.5413: "999.54", 1000.0: "1000"}
    for number, text in numbers.items():
        assert CURES.short(number) == text
    assert CURES.short(-0.0) == "0"
    assert CURES.short([[float("nan"), 0.5]]) == "[**NaN**, 0.5]"
    assert CURES.short([[1.0, 2.0], [0.0, -float("inf")]]) == "[[1, 2],<br>[0, -inf]]"


def test_the_table_of_errors_equals_the_measurements(made_with, tmp_path):
    tables = made_with("tables")
    with pytest.raises(FileNotFoundError, match=re.escape("python -m benchmarks.ulp")):
        tables.write_ulp(tmp_path / "ulp.json", tmp_path)
    results = ROOT / "benchmarks" / "results" / "ulp.json"
    report = json.loads(results.read_text(encoding="utf-8"))
    public = {*stablenum.numerics.__all__, *stablenum.losses.__all__}
    assert {name.partition(" ")[0] for name in report} == public
    tables.write_ulp(results, tmp_path)
    text = (tmp_path / "ulp.md").read_text(encoding="utf-8")
    value, gradient = report["log"]["float64"]["stablenum_jax"]
    assert f" {value:.1f} / {gradient:.1f} |" in text[text.index("## float64") :]
    small = {"f": {"float32": {"stablenum_torch": [0.5, 244.2], "stablenum_jax": [None, 18565221.3]}}}
    (tmp_path / "ulp.json").write_text(json.dumps(small), encoding="utf-8")
    tables.write_ulp(tmp_path / "ulp.json", tmp_path)
    text = (tmp_path / "ulp.md").read_text(encoding="utf-8")
    assert "| `f` | 0.5 / 244 | not finite / 2e7 |" in text
    small["f"]["float32"]["else"] = [0.5, 0.5]
    (tmp_path / "ulp.json").write_text(json.dumps(small), encoding="utf-8")
    with pytest.raises(ValueError, match="stablenum_torch, stablenum_jax, else"):
        tables.write_ulp(tmp_path / "ulp.json", tmp_path)


def test_the_table_of_the_losses_requires_times_and_memory_of_the_same_variants(made_with, tmp_path):
    tables, results = made_with("tables"), tmp_path / "losses.json"
    with pytest.raises(FileNotFoundError, match="python -m benchmarks losses"):
        tables.write_losses(results, tmp_path)
    row = {
        "size": "(8, 4)",
        "times": {
            "optax": {"median_ms": 200.0, "spread": 0.1},
            "stablenum_jax": {"median_ms": 190.4, "spread": 0.02},
        },
        "ratio": 0.952,
        "peak_bytes": {"optax": 2**21, "stablenum_jax": 2**20},
    }
    report = {"versions": {"jax": "0.1"}, "jax cross_entropy": row}
    results.write_text(json.dumps(report), encoding="utf-8")
    tables.write_losses(results, tmp_path)
    text = (tmp_path / "losses.md").read_text(encoding="utf-8")
    assert "| cross entropy, (8, 4) | `optax` | 200 | 10% |  | 2 |" in text
    assert "|  | `stablenum_jax` | 190 | 2% | 0.95 | 1 |" in text
    del row["peak_bytes"]["optax"]
    results.write_text(json.dumps({"jax cross_entropy": row}), encoding="utf-8")
    with pytest.raises(ValueError, match="jax cross_entropy: expected size, ratio"):
        tables.write_losses(results, tmp_path)
    results.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="no loss in it"):
        tables.write_losses(results, tmp_path)
