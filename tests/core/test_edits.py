"""Edits of a user's source: what they change, what they leave alone, and how they are tried."""

import ast
import importlib.machinery

import pytest

from stablenum.diagnosis.edits.bounds import bounded
from stablenum.diagnosis.edits.edit import Edit, StaleEditError, segment
from stablenum.diagnosis.edits.expressions import called, node_at, span_of
from stablenum.diagnosis.edits.written_by_hand import argument_of
from stablenum.diagnosis.replay.findings import Finding
from stablenum.diagnosis.replay.values import Place, TensorStats
from stablenum.diagnosis.watch.edit_trials import steps_of_trial, tried
from stablenum.diagnosis.watch.edited_sources import compiled, install
from stablenum.diagnosis.watch.plan import Failure, Outcome, Plan


def edit_of(source, before, after, module=""):
    """Return an edit of the first expression that reads ``before``."""
    nodes = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.expr))
    node = next(n for n in nodes if ast.get_source_segment(source, n) == before)
    return Edit(file="train.py", span=span_of(node), before=before, after=after, module=module)


@pytest.mark.parametrize(
    ("source", "before", "after", "result"),
    [
        ("y = a / b  # mean\n", "a / b", "f(a, b)", "y = f(a, b)  # mean\n"),
        ("é = 'ü'; y = (ä / b) + 1\n", "ä / b", "f(ä, b)", "é = 'ü'; y = (f(ä, b)) + 1\n"),
        ("y = (a\n     / b)\nz = 1\n", "a\n     / b", "f(a, b)", "y = (f(a, b\n))\nz = 1\n"),
        (
            "y = g(\n    a,\n).h / b",
            "g(\n    a,\n).h / b",
            "f(g(\n    a,\n).h, b)",
            "y = f(g(\n    a,\n).h, b)",
        ),
    ],
)
def test_one_expression_changes_and_every_line_keeps_its_number(source, before, after, result):
    assert edit_of(source, before, after).applied(source) == result


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (
            '"""Train."""\nimport torch\nfrom torch import nn\ny = a / b\n',
            "from torch import nn; import safe",
        ),
        ("import torch as safe_torch\nimport safe\ny = a / b\n", "import safe"),
        ("try:\n    import torch\nfinally:\n    pass\ny = a / b\n", 'y = __import__("safe").f(a, b)'),
    ],
)
def test_the_module_is_imported_once_without_a_new_line(source, line):
    edited = edit_of(source, "a / b", "safe.f(a, b)", "safe").applied(source)
    assert len(edited.splitlines()) == len(source.splitlines())
    assert line in edited.splitlines()
    assert edited.count("import safe\n") + edited.count('__import__("safe")') == 1
    ast.parse(edited)


def test_a_patch_shows_the_lines_without_their_indent():
    source = "import torch\ndef f(a, b):\n    return (a /\n            b)\n"
    edit = edit_of(source, "a /\n            b", "safe.f(a, b)", "safe")
    assert edit.shown(source) == (
        "+ import safe", "- return (a /", "-         b)", "+ return (safe.f(a, b))",
    )  # fmt: skip


@pytest.mark.parametrize("now", ["y = a / c\n", "", "x = 1\ny = a / b\n"])
def test_a_file_that_has_changed_is_not_edited(now):
    with pytest.raises(StaleEditError, match=r"train\.py:1 no longer reads 'a / b'.*Run the command again"):
        edit_of("y = a / b\n", "a / b", "f(a, b)").applied(now)


def test_an_edit_survives_json_in_a_plan(tmp_path):
    edit = edit_of("y = a / b\n", "a / b", "f(a, b)")
    Plan(script="train.py", edits=(edit.to_dict(),)).write(tmp_path / "plan.json")
    assert [Edit.from_dict(d) for d in Plan.read(tmp_path / "plan.json").edits] == [edit]


def test_only_the_file_of_an_edit_is_changed_and_nothing_on_the_disk(tmp_path, monkeypatch):
    source = "# -*- coding: latin-1 -*-\ndef f(a, b):\n    return a / b  # ä\n"
    for name in ("edited_module", "other_module"):
        (tmp_path / f"{name}.py").write_text(source, encoding="latin-1")
    edit = edit_of(source, "a / b", "max(a, b)")
    edits = [Edit(**{**edit.to_dict(), "file": str(tmp_path / "edited_module.py")})]
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        importlib.machinery.SourceFileLoader, "get_code", importlib.machinery.SourceFileLoader.get_code
    )
    install(edits)
    import edited_module
    import other_module

    assert (edited_module.f(6, 2), other_module.f(6, 2)) == (6, 3)
    assert (tmp_path / "edited_module.py").read_text(encoding="latin-1") == source
    names = {}
    exec(compiled(str(tmp_path / "edited_module.py"), edits), names)
    assert names["f"](6, 2) == 6


@pytest.mark.parametrize(
    ("text", "name", "operands"),
    [
        ("a / b", "div", ["a", "b"]),
        ("torch.div(a, b)", "div", ["a", "b"]),
        ("a.div(b)", "div", ["a", "b"]),
        ("jnp.linalg.norm(v, axis=-1)", "norm", ["v"]),
        ("torch.nn.functional.softmax(x, -1)", "softmax", ["x", "-1"]),
        ("model(x).softmax(-1)", "softmax", ["model(x)", "-1"]),
        ("log(x)", "log", ["x"]),
    ],
)
def test_an_operation_is_read_however_it_is_written(text, name, operands):
    found = called(ast.parse(text, mode="eval").body)
    assert (found.name, [ast.unparse(x) for x in found.operands]) == (name, operands)


@pytest.mark.parametrize("text", ["f(*xs)", "f(**options)", "x[0]", "-x", "a < b", "f()(x)"])
def test_what_does_not_show_its_operands_is_no_operation(text):
    assert called(ast.parse(text, mode="eval").body) is None


@pytest.mark.parametrize(
    ("function", "text", "argument"),
    [
        ("softplus", "torch.log1p(z.exp())", "z"),
        ("softplus", "(1.0 + jnp.exp(f(z))).log()", "f(z)"),
        ("log_sigmoid", "torch.log(torch.sigmoid(z))", "z"),
        ("log_sigmoid", "jnp.log(1 - jax.nn.sigmoid(z))", "z"),
        ("logsumexp", "jnp.log(jnp.sum(jnp.exp(z), axis=-1))", "z"),
        ("logsumexp", "z.exp().sum(-1).log()", "z"),
        ("log_softmax", "torch.softmax(z, -1).log()", "z"),
        ("log_softmax", "jnp.log(jnp.exp(z) / jnp.exp(z).sum())", "z"),
        ("softmax", "z.exp() / z.exp().sum(-1, keepdim=True)", "z"),
        ("softmax", "z.exp() / w.exp().sum(-1)", None),
        ("softplus", "torch.log(2 + torch.exp(z))", None),
        ("log_sigmoid", "torch.log(1 + torch.sigmoid(z))", None),
        ("logsumexp", "torch.exp(z).sum()", None),
        ("normalize", "x.y / jnp.linalg.norm(x.y, axis=-1, keepdims=True)", "x.y"),
        ("normalize", "z / z.norm(dim=-1)", "z"),
        ("normalize", "z / w.norm(dim=-1)", None),
        ("rms_norm", "z / z.square().mean().sqrt()", None),
    ],
)
def test_a_function_written_by_hand_is_read_from_one_expression(function, text, argument):
    found = argument_of(function, ast.parse(text, mode="eval").body)
    assert (found and ast.unparse(found[0])) == argument
    assert bool(found and found[1]) == ("1 - " in text)


def test_an_expression_is_found_by_its_span_alone():
    source = "y = f(a / b) + c / d\n"
    tree = ast.parse(source)
    assert ast.unparse(node_at(tree, (1, 1, 15, 20))) == "c / d"
    assert node_at(tree, (1, 1, 5, 20)) is None
    assert segment(source, (2, 2, 0, 1)) == ""


FIRST = Outcome(failure=Failure(step=3, what="loss"))


@pytest.mark.parametrize(
    ("trial", "helps", "said"),
    [
        (Outcome(steps=14), True, "step 3 is finite, and so are the 10 steps after it"),
        (Outcome(steps=5), True, "step 3 is finite, and so is the step after it"),
        (Outcome(steps=4), True, "step 3 is finite"),
        (Outcome(steps=3, failure=Failure(step=3, what="loss")), False, "step 3 still fails"),
        (Outcome(steps=2, failure=Failure(step=2, what="loss")), False, "step 3 still fails"),
        (
            Outcome(steps=7, failure=Failure(step=7, what="loss")),
            True,
            "step 3 is finite, and so are the 3 steps after it; then the loss of step 7 is not finite",
        ),
        (Outcome(exit_code=1, error="ValueError: no"), False, "the script ends with ValueError: no"),
        (
            Outcome(lost=True, exit_code=9, error="a sudden exit"),
            False,
            "nothing is known, because a sudden exit",
        ),
        (
            Outcome(steps=9, trouble="look in step 1: KeyError", troubles=2),
            False,
            "nothing is known, because look",
        ),
        (
            Outcome(steps=9, losses=[4.0, 3.0, 2.0, float("nan"), 1.0, 0.5, 0.25]),
            True,
            "step 3 is finite, and so are the 5 steps after it; the loss is 3 before it and 0.5 at the end",
        ),
    ],
)
def test_a_trial_says_what_was_seen_and_no_more(trial, helps, said):
    result = tried(FIRST, trial)
    assert result.helps is helps
    assert result.said.startswith(said)


def test_a_trial_names_another_place_at_which_it_fails():
    report = {"evidence": {"findings": [{"place": {"file": "a.py", "line": 7}}]}}
    trial = Outcome(failure=Failure(step=3, what="loss"), report=report)
    assert tried(FIRST, trial).said == "step 3 still fails, at a.py:7"
    first = Outcome(failure=Failure(step=3, what="loss"), report=report)
    assert tried(first, trial).said == "step 3 still fails"


def test_a_trial_counts_calls_where_the_failure_does():
    first = Outcome(failure=Failure(step=3, what="output", unit="call"))
    assert tried(first, Outcome(calls=6)).said == "call 3 is finite, and so are the 2 calls after it"


@pytest.mark.parametrize(("failed", "steps"), [(0, 11), (5, 16), (40, 81), (5000, 5101)])
def test_a_trial_takes_as_many_steps_after_the_failure_as_before_it_within_bounds(failed, steps):
    assert steps_of_trial(failed) == steps


BOUNDED = [
    ("torch", "torch.exp(a * b)", "exp", "torch.clamp(a * b, max=44)"),
    ("torch", "(a - b).exp()", "exp", "torch.clamp(a - b, max=44)"),
    ("torch", "torch.logit(p)", "logit", "torch.clamp(p, min=1e-06, max=0.999999)"),
    ("torch", "T.logit(p)", "logit", "torch.clamp(p, min=1e-06, max=0.999999)"),
    ("jax", "jnp.log1p(-x)", "log1p", "jnp.clip(-x, min=-0.999999)"),
    ("jax", "jax.scipy.special.erfinv(x)", "erfinv", "jnp.clip(x, min=-0.999999, max=0.999999)"),
]


@pytest.mark.parametrize(("framework", "text", "operation", "after"), BOUNDED)
def test_an_argument_is_bounded_inside_the_domain(framework, text, operation, after):
    source = f"import torch, torch as T, jax.numpy as jnp\ny = {text} + 1\n"
    place = Place("train.py", 2, "", f"y = {text} + 1", (2, 2, 4, 4 + len(text)))
    read = TensorStats(dtype="float32", shape=(3,), size=3, min=0.0, max=99.0, amax=99.0)
    finding = Finding(operation=operation, phase="forward", kind="inf", place=place, inputs=(read,))
    edit = bounded(finding, framework, source)[0]
    assert edit.after == after
    assert edit.applied(source) == source.replace(f"({edit.before})", f"({after})")


@pytest.mark.parametrize(("operation", "offered"), [("asin", False), ("logit", False), ("log2", True)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_bound_that_a_format_rounds_to_1_is_not_offered(dtype, operation, offered):
    text = f"torch.{operation}(x)"
    place = Place("train.py", 1, "", text, (1, 1, 0, len(text)))
    read = TensorStats(dtype=dtype, shape=(3,), size=3, min=0.0, max=1.0, amax=1.0)
    finding = Finding(operation=operation, phase="forward", kind="nan", place=place, inputs=(read,))
    assert bool(bounded(finding, "torch", f"{text}\n")) is offered


@pytest.mark.parametrize("text", ["g(x)", "x * y", "torch.exp"])
def test_what_does_not_show_the_argument_is_left_alone(text):
    place = Place("train.py", 1, "", text, (1, 1, 0, len(text)))
    finding = Finding(operation="asin", phase="forward", kind="nan", place=place)
    assert bounded(finding, "torch", text + "\n") == []
