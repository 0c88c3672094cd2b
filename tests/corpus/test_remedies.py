"""Every edit that follows from a planted failure is applied to the program's source, which is run again."""

import types
from pathlib import Path

import pytest

from corpus.case import FRAMEWORKS, build, modules
from corpus.tools.ours import replay
from stablenum.diagnosis.edits.safe_forms import edits_for
from tests.corpus.running import plain
from tests.selection import REPEATS, one_in_three

# Programs in which another line is not finite for the same numbers: the edit alone is not enough, so that
# ``explain``, which runs the script with it, does not offer it.
NOT_ENOUGH = {
    "jax-cosine_of_zero_vector", "jax-rotary_angle_of_zero_vector", "jax-weight_norm_of_zeros",
    "fully_masked_log_softmax", "gaussian_nll_zero_variance", "kl_divergence_divides_by_zero",
    "normal_log_prob_scale_zero", "variance_one_pass_negative",
}  # fmt: skip
# Newton's method ends at the NaN, and does not end without it: ``explain`` ends the trial.
ENDLESS = {"newton_divides_by_zero"}
# The rule of a forward derivative must be linear in its tangent, which a safe quotient of the tangent is not.
REFUSED = {"custom_derivative_rule"}


def cases():
    for framework in FRAMEWORKS:
        for module in modules("failing"):
            name = module.__name__.rpartition(".")[2]
            if build(module, framework) is None or name in ENDLESS | REFUSED:
                continue
            fast = framework == "torch" and one_in_three(name)
            yield pytest.param(framework, module, id=f"{framework}-{name}", marks=[] if fast else [REPEATS])


@pytest.mark.parametrize(("framework", "module"), list(cases()))
def test_an_edit_runs_and_leaves_nothing_that_is_not_finite(framework, module):
    report = replay(framework, build(module, framework)())
    source = Path(module.__file__).read_text(encoding="utf-8")
    edits = [] if report.ok or not report.findings else edits_for(report.findings[0], report.verdict, source)
    if not edits:
        pytest.skip("no edit follows from this failure")
    edited = types.ModuleType("edited")
    edited.__file__ = module.__file__
    exec(compile(edits[0].applied(source), module.__file__, "exec"), edited.__dict__)
    finite, *_ = plain(framework, getattr(edited, f"in_{framework}")())
    name = module.__name__.rpartition(".")[2]
    assert finite is not bool({name, f"{framework}-{name}"} & NOT_ENOUGH), edits[0]
