"""Text from outside is escaped in one place: for terminals, for pages, and for generated code."""

from __future__ import annotations

import ast
import io
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import stablenum
import stablenum_torch
from stablenum import Reason, cli
from stablenum._support.outside_text import in_code, in_html, printable
from stablenum.commands.report import watch
from stablenum.commands.terminal import Terminal
from stablenum.diagnosis.checkup.report import Checkup
from stablenum.diagnosis.checkup.symptoms import Complaint, Level, Symptom
from stablenum.guard.readout import Worst
from stablenum.runlog.lines import Rewind
from stablenum.runlog.reading import read_run
from tests.core.test_report import log_of_zero, report_of
from tests.report.logs import begun, record

ROOT = Path(__file__).parents[1]
FORGED = "model.pt: good"
# A line break and a forged line, ESC and its C1 twin, a carriage return, tags, quotes, an override of the
# direction of writing.
HOSTILE = f'w\n{FORGED}\r{FORGED}\x1b[2J\x9b2J[bold]<b onclick=\'x\'>""" + print(1) + """\u202e\\N'


def check(text: str) -> str:
    """Check that a text does nothing to a terminal, and that no line of it is forged."""
    assert {c for c in text if not c.isprintable()} <= {"\n", "\t"}
    assert not [line for line in text.split("\n") if line.strip().startswith(FORGED)], text
    return text


def check_page(page: str) -> None:
    assert "<b onclick" not in page
    assert {c for c in page if not c.isprintable()} <= {"\n", "\t", "\u00a0"}


def run(*arguments: object, names: str = "report") -> str:
    result = CliRunner().invoke(cli.app(names, "verify"), [*map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for package in ("stablenum", "stablenum_jax", "stablenum_torch"):
        for path in (ROOT / package).rglob("*.py"):
            yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def test_nothing_goes_past_the_one_place():
    """No module escapes by itself, and no command prints by itself."""
    own = {"stablenum/_support/outside_text.py", "stablenum/commands/terminal.py"}
    passed = []
    for path, tree in sources():
        if path.as_posix() in own:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in (
                "html",
                "rich.markup",
                "xml.sax.saxutils",
            ):
                passed.append(f"{path}:{node.lineno} imports {node.module}")
            if not isinstance(node, ast.Call) or path.parts[1] != "commands":
                continue
            called = ast.unparse(node.func)
            if called in ("Console", "Text", "Text.assemble", "print", "typer.echo", "typer.secho"):
                passed.append(f"{path}:{node.lineno} calls {called}")
    assert not passed


@pytest.mark.parametrize(
    "text", ["\n", "\x00", "\x1b[0m", "\x85", "\x9b", "\u2028", "\ud800", "\u202e", "\x7f"]
)
def test_each_kind_is_shown_as_python_escapes_it(text):
    assert printable(f"a{text}b") == f"a{ascii(text)[1:-1]}b"
    assert text == "\n" or text not in in_html(text)
    for quotes in ("'", '"', '"""', "'''"):
        assert ast.literal_eval(quotes + in_code(text + quotes + "\\") + quotes) == text + quotes + "\\"


def test_verify(tmp_path):
    bad, good = tmp_path / f"{HOSTILE.replace('/', '')}.pt", tmp_path / "b.pt"
    torch.save({"model": {HOSTILE: torch.tensor([math.nan]), "x": torch.ones(1)}}, bad)
    torch.save({HOSTILE: torch.tensor([math.inf, 1e30])}, good)
    (tmp_path / "c.pt").write_bytes(b"\x80\x02" + HOSTILE.encode())
    for paths in ([bad], [bad, good], [tmp_path]):
        text = check(
            run("verify", *paths, "--html", tmp_path / "page.html", "--json", tmp_path / "page.json")
        )
        assert "w\\nmodel" in text
        check_page((tmp_path / "page.html").read_text("utf-8"))
        assert (
            HOSTILE
            in json.loads((tmp_path / "page.json").read_text("utf-8"))["checkpoints"][0]["path"] + HOSTILE
        )


def test_report(tmp_path):
    log, other = tmp_path / f"{HOSTILE.replace('/', '')}.jsonl", tmp_path / "other.jsonl"
    for path in (log, other):
        file = begun(path, settings={HOSTILE: str(path)}, optimizer={"class": HOSTILE, HOSTILE: str(path)})
        bad = record(1, loss=math.nan, reason=Reason.NONFINITE_LOSS, worst=Worst(0, HOSTILE))
        file.write([record(0, worst=Worst(0, HOSTILE)), bad])
        file.go_back(Rewind(HOSTILE, 1, 1, HOSTILE, HOSTILE), [record(0, worst=Worst(0, HOSTILE))])
        file.write([record(0, worst=Worst(0, HOSTILE)), record(1, worst=Worst(0, HOSTILE))])
    for logs in ([log], [log, other]):
        check(run("report", *logs, "--html", tmp_path / "page.html"))
        check_page((tmp_path / "page.html").read_text("utf-8"))
    terminal = Terminal(file=io.StringIO(), width=100)
    terminal.print(watch.shown(read_run(log), 100))
    check(terminal.file.getvalue())


def test_usage_errors(tmp_path):
    for arguments in (
        ["verify", tmp_path / HOSTILE],
        ["report", tmp_path / HOSTILE / "a.jsonl"],
        ["report", tmp_path, "--html", HOSTILE],
        ["report", f"--{HOSTILE}"],
        [HOSTILE],
    ):
        assert "rror" in check(run(*arguments)), arguments
    assert "rror" in check(run("diff", tmp_path / HOSTILE, names="diff"))
    pair = tmp_path / "pair.py"
    pair.write_text(f"def left(): raise ValueError({HOSTILE!r})\nright = left\n", encoding="utf-8")
    assert "w\\nmodel" in check(run("diff", pair, names="diff"))
    toml = tmp_path / "scenarios.toml"
    name = json.dumps(HOSTILE)
    toml.write_text(f"[[scenario]]\nname = {name}\nabout = {name}\nkind = {name}\n", encoding="utf-8")
    check(run("compare", "--config", toml, names="compare"))


@pytest.mark.parametrize("make", [str, lambda report: shown(report, colour=False)])
def test_reports_of_explain_and_checkup(make):
    place = stablenum.diagnosis.Place(HOSTILE, 7, HOSTILE, HOSTILE)
    report = report_of(
        log_of_zero(module=HOSTILE, place=place, frames=(place, place)), notes=(HOSTILE, HOSTILE)
    )
    check(make(report))
    check_page(report.to_html())
    words = dict.fromkeys(("what", "module", "cure", "expects", "tried"), HOSTILE)
    inner = Complaint.of(Symptom.DEAD_UNITS, Level.FAULT, HOSTILE, place=place, places=(place,), **words)
    complaint = inner.with_(consequences=(inner,))
    checkup = Checkup(complaints=(complaint,) * 5, steps=3, measured=1, losses=None, notes=(HOSTILE,))
    check(make(checkup))
    check_page(checkup.to_html())


def shown(report: object, *, colour: bool) -> str:
    terminal = Terminal(file=io.StringIO(), width=300, force_terminal=colour)
    terminal.print(report)
    return terminal.file.getvalue()


def programs(folder: str) -> list[object]:
    """Return two programs that differ, in a file of this name."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(4, 4), torch.linspace(-2, 2, 8).reshape(2, 4)
    source = "def made(layer, function):\n    return lambda x: function(layer(x)).square().mean()\n"
    scope: dict[str, object] = {}
    exec(compile(source, os.path.join(folder, "train.py"), "exec"), scope)
    return [stablenum_torch.program(scope["made"](layer, f), x) for f in (torch.sin, torch.tanh)]


@pytest.mark.parametrize("folder", ['a""" + str(ran.append(1)) + """b', r"C:\Users\new", "a\n'b\\", HOSTILE])
def test_a_reproduction_has_names_of_files_as_text_only(folder, tmp_path):
    report = stablenum.diff(*programs(folder))
    report.write_repro(tmp_path)
    for script in tmp_path.glob("*.py"):
        text = check(script.read_text("utf-8"))
        tree = ast.parse(text)
        said = ast.get_docstring(tree, clean=False)
        rest = ast.unparse(tree.body[1:])
        assert "ran.append" not in rest
        assert "print(1)" not in rest
        if script.name == "compare.py":
            assert os.path.join(folder, "train.py") in said
    check(str(report))
    check(shown(report, colour=False))
    check_page(report.to_html())
