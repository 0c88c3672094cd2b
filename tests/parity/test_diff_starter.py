"""``stablenum diff --init`` writes a pair that can be compared; a terminal shows lines that fit."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import stablenum
from stablenum.cli import app
from stablenum.commands.diff.pair import load_pair


def call(*words: str):
    return CliRunner().invoke(app("diff"), ["diff", *words])


def test_the_pair_that_is_written_can_be_compared(tmp_path: Path) -> None:
    path = tmp_path / "pair.py"
    result = call("--init", str(path))
    assert result.exit_code == 0, result.output
    assert f"stablenum diff {path}" in result.output
    pair = load_pair(path)
    assert stablenum.diff(pair.left, pair.right).ok


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "pair.py"
    path.write_text("mine = 1\n")
    result = call("--init", str(path))
    assert result.exit_code == 2
    assert "File exists" in result.output
    assert path.read_text() == "mine = 1\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pair.txt"], "must end in .py"),
        (["a.py", "b.py"], "leave out RIGHT"),
        (["no/pair.py"], "No such file"),
    ],
)
def test_what_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("--init", *words)
    assert result.exit_code == 2
    assert said in result.output
    assert not list(tmp_path.iterdir())


def test_sentences_are_wrapped_in_a_terminal_and_code_is_not(tmp_path: Path) -> None:
    path = tmp_path / "pair.py"
    call("--init", str(path))
    long = "jnp.mean((x @ params['kernel'] + params['bias'] - y) ** 2) * (1 + 1 / 2) + 0 * x.sum()"
    text = path.read_text().replace('jnp.mean((x @ params["kernel"] + params["bias"] - y) ** 2)', long)
    path.write_text(text)
    pair = load_pair(path)
    report = stablenum.diff(pair.left, pair.right)
    assert not report.ok

    def printed(*, terminal: bool) -> list[str]:
        console = Console(file=io.StringIO(), width=70, force_terminal=terminal, color_system=None)
        console.print(report, soft_wrap=True)
        return console.file.getvalue().splitlines()

    shown, piped = printed(terminal=True), printed(terminal=False)
    assert piped == str(report).splitlines()
    assert any(len(line) > 70 and "why" in line for line in piped)
    code = [line.strip() for line in shown if len(line) > 70 and " " in line.strip()]  # a path stays whole
    assert code == [f"return {long}"]
    assert " ".join(" ".join(shown).split()) == " ".join(" ".join(piped).split())
