"""The command with its extras missing: it lists itself, shows its help, and says what to install."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import stablenum
from stablenum.commands.index import CLI, COMMANDS
from tests.test_imports import EVERY_LIBRARY, run

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# What is blocked where the extra cli alone is installed, and where none is. The core needs array_api_compat.
CLI_ALONE = tuple({*EVERY_LIBRARY, "matplotlib", "ml_dtypes", "sklearn", "tomli_w"} - {"array_api_compat"})
NO_EXTRA = (*CLI_ALONE, "click", "rich", "shellingham", "typer")

# Calls the command with one list of words after another, and prints what it writes and how it ends.
CALLS = """
from stablenum.cli import main
sys.stderr = sys.stdout
for words in {lines!r}:
    sys.argv = ["stablenum", *words]
    print(">", *words)
    try:
        main()
    except SystemExit as end:
        print("<", end.code or 0)
"""


def said(lines: list[list[str]], blocked: tuple[str, ...]) -> dict[str, tuple[int, str]]:
    """The exit code and the output of each call, all in one interpreter without the ``blocked`` packages."""
    result = run(CALLS.format(lines=lines), blocked)
    assert result.returncode == 0, result.stderr
    calls = {}
    for call in f"\n{result.stdout}".split("\n>")[1:]:
        words, _, rest = call.partition("\n")
        text, _, code = rest.rpartition("< ")
        calls[words.strip()] = (int(code), " ".join(text.split()))
    return calls


def test_without_any_extra_the_commands_are_listed_with_what_they_lack():
    lines = [["--version"], ["--help"], ["-h"], [], ["nonesuch"], *([name] for name in COMMANDS)]
    calls = said([*lines, ["explain", "--help"]], NO_EXTRA)
    assert calls["--version"] == (0, f"stablenum {stablenum.__version__}")
    assert calls["--help"] == calls["-h"] == (0, calls[""][1])
    assert calls[""][0] == 2
    code, text = calls["nonesuch"]
    assert code == 2
    assert "no command 'nonesuch'" in text
    for name, command in COMMANDS.items():
        code, text = calls[name]
        assert code == 2
        assert text.startswith(f"stablenum: {name} needs rich, typer")
        assert f"{name} {command.about} {text.removeprefix(f'stablenum: {name} ')}" in calls["--help"][1]
    assert calls["report"][1].endswith("needs rich, typer: pip install rich typer")
    assert calls["explain"][1].endswith("torch (or jax): pip install rich typer numpy torch")
    assert calls["explain --help"] == calls["explain"]


def test_with_the_extra_cli_alone_every_command_has_its_help():
    lacks = {
        "explain x.py": "explain needs numpy, torch (or jax): pip install numpy torch",
        "checkup x.py": "checkup needs numpy, torch (or jax): pip install numpy torch",
        "diff x.py": "diff needs numpy: pip install numpy",
        "verify .": "verify needs ml-dtypes, numpy: pip install ml-dtypes numpy",
        "compare --list": "compare needs matplotlib, ml-dtypes, numpy, scikit-learn: pip install "
        "matplotlib ml-dtypes numpy scikit-learn",
    }
    helps = ["--help", *(f"{name} --help" for name in COMMANDS)]
    calls = said([line.split() for line in (*helps, *lacks, "report nonesuch.jsonl")], CLI_ALONE)
    for line in helps:
        code, text = calls[line]
        assert code == 0, text
        assert "Options:" in text
    for name, command in COMMANDS.items():
        assert f"{name} {command.about}" in calls["--help"][1]
    assert {line: calls[line] for line in lacks} == {
        line: (2, f"stablenum: {text}") for line, text in lacks.items()
    }
    assert "there is no file 'nonesuch.jsonl'" in calls["report nonesuch.jsonl"][1]


def test_a_framework_without_what_its_adapter_needs_names_the_package():
    result = run("from stablenum.commands.explain import child\nchild._part_of('jax', 'watch')", ("jax",))
    assert "watching jax needs jax: pip install jax" in result.stderr


def distributions(extra: str) -> set[str]:
    """What an extra installs, with the extras that it contains."""
    needs = {need.partition(">=")[0] for need in EXTRAS[extra]}
    return needs.union(*(distributions(part[10:-1]) for part in needs if part.startswith("stablenum[")))


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_needs_is_in_an_extra(name):
    found = set().union(*map(distributions, EXTRAS.keys() - {"all"}))
    for need in (*CLI, *COMMANDS[name].needs):
        assert found & ({"torch", "jax"} if need == "torch (or jax)" else {need}), need


@pytest.mark.parametrize(("framework", "package"), [("torch", "torch"), ("jax", "jax"), ("jax", "optax")])
def test_an_adapter_without_its_framework_says_what_to_install(framework, package):
    result = run(f"import stablenum_{framework}", (package,))
    assert f"stablenum_{framework} needs" in result.stderr
    assert "pip install" in result.stderr.strip().rpartition("\n")[2]
