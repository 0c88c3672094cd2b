"""What a checkup says first, and what it does not say: facts, and causes that can do what is laid to them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from stablenum.diagnosis.checkup.course import Course, Drawn, Loss, ParameterSeen, Probe
from stablenum.diagnosis.checkup.ranking import complaints, ranked
from stablenum.diagnosis.checkup.report import Checkup
from stablenum.diagnosis.checkup.symptoms import Complaint, Level, Symptom
from stablenum_jax._diagnosis.checkup.marks import GRADIENT, PARAMETER, USED
from stablenum_jax._diagnosis.checkup.measuring import MeasuredCall, parameters_seen
from tests.checkups import run_checkup
from tests.selection import REPEATS

TORCH = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
for step in range(40):
    x = torch.randn(16, 4)
    loss = (model(x)[:, 0] - x[:, 0]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
# Weights fall towards 0 because the best output is 0: no decay is to blame.
TO_ZERO = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 3, bias=False)
opt = torch.optim.{opt}
for step in range(60):
    loss = model(torch.randn(32, 4)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
TO_ZERO_IN_JAX = """
import jax, jax.numpy as jnp, optax
w = jax.random.normal(jax.random.key(9), (4, 3))
tx = optax.{opt}
state = tx.init(w)

@jax.jit
def train(w, state, x):
    loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    up, state = tx.update(g, state, w)
    return optax.apply_updates(w, up), state, loss

for step in range(60):
    w, state, loss = train(w, state, jax.random.normal(jax.random.key(step), (32, 4)))
"""


def checked(source, tmp_path):
    (tmp_path / "train.py").write_text(source)
    _, report = run_checkup("train.py", tmp_path, tmp_path / "report.json", "--once")
    return report


@pytest.mark.parametrize(
    "opt",
    [pytest.param("SGD(model.parameters(), lr=0.1)", marks=REPEATS), "AdamW(model.parameters(), lr=1e-2)"],
)
def test_weights_that_gradients_shrink_are_not_blamed_on_decay_in_torch(opt, tmp_path):
    report = checked(TO_ZERO.format(opt=opt), tmp_path)
    assert [c["symptom"] for c in report["complaints"]] == [], report


@pytest.mark.parametrize("opt", ["adam(3e-2)", pytest.param("sgd(0.5)", marks=REPEATS)])
def test_weights_that_gradients_shrink_are_not_blamed_on_decay_in_jax(opt, tmp_path):
    report = checked(TO_ZERO_IN_JAX.format(opt=opt), tmp_path)
    assert [c["symptom"] for c in report["complaints"]] == [], report


def test_a_nan_in_the_parameters_comes_first_and_follows_from_nothing_that_cannot_make_it(tmp_path):
    bad = "    if step == 20:\n        model[0].weight.data[0, 0] = float('nan')\n"
    report = checked(TORCH + bad, tmp_path)
    first = report["complaints"][0]
    assert first["symptom"] == "not_finite"
    assert first["level"] == "fault"
    assert "0.weight" in first["parameters"]
    assert "stablenum explain" in first["cure"]
    assert not report["ok"]


# --- the rule itself, on courses that are made up


def course(sizes, *, settings, rate=1e-2, losses=(4.0, 3.0, 3.0, 3.5, 3.4, 3.4)):
    """Return a training in which a weight has these sizes, a step apart, shrinking along itself."""
    probes = []
    for step, (size, after) in enumerate(zip(sizes, [*sizes[1:], sizes[-1]], strict=True)):
        shrink = 1 - after / size if size else 0.0
        probes.append(Probe(step=step, parameters=(seen(size, shrink),)))
    return Course(
        framework="torch",
        steps=len(sizes),
        probes=probes,
        rates=[(step, rate) for step in range(len(sizes))],
        losses=[Loss(step, value) for step, value in enumerate(losses)],
        settings=settings,
    )


def seen(size, shrink):
    values = {"weight": size, "gradient": 0.1, "zero": 0.0, "update": size * abs(shrink), "still": 0.0}
    values |= {
        "shrink": shrink,
        "apart": 1.0,
        "rise": -0.1,
        "rate": 1e-2,
        "dtype": "float32",
        "has_gradient": True,
    }
    names = [n for n in ParameterSeen._fields if n not in ("name", "shape", "size")]
    return ParameterSeen("w", (4, 4), **{n: values[n] for n in names if n in values})


SHRINKING = [1.0 * 0.5**i for i in range(6)]


@pytest.mark.parametrize(
    ("settings", "blamed"),
    [
        ((("SGD", {"weight_decay": 0.0}),), False),
        ((("SGD", {}),), False),
        ((("AdamW", {"weight_decay": 0.01}),), False),  # 6 x 0.01 x 0.01 is far from ln 32
        ((("SGD", {"weight_decay": 60.0}),), True),
        ((("AdamW", {"weight_decay": 60.0}),), True),
        ((("SGD", {"weight_decay": 6.0, "momentum": 0.9}),), True),  # momentum repeats it ten times
        ((("SGD", {"weight_decay": 6.0}),), False),
    ],
)
def test_decay_is_blamed_for_no_more_than_it_can_do(settings, blamed):
    found = [c.symptom for c in complaints(course(SHRINKING, settings=settings))]
    assert (Symptom.WEIGHT_DECAY in found) is blamed


def test_decay_is_not_blamed_in_a_training_that_converges():
    settings = (("SGD", {"weight_decay": 60.0}),)
    losses = [4.0, 0.5, 0.1, 0.05, 0.01, 0.001]
    found = complaints(course(SHRINKING, settings=settings, losses=losses))
    assert Symptom.WEIGHT_DECAY not in [c.symptom for c in found]


def complaint(symptom, since=0, level=Level.FAULT):
    return Complaint.of(symptom, level, "seen", since=since)


@pytest.mark.parametrize("symptom", sorted(set(Symptom) - {Symptom.NOT_FINITE, Symptom.LOSS_NOT_FINITE}))
def test_what_is_not_finite_follows_only_from_what_can_make_it_and_came_before(symptom):
    for fact in (Symptom.NOT_FINITE, Symptom.LOSS_NOT_FINITE):
        later = ranked([complaint(symptom, since=9), complaint(fact, since=5)])
        assert fact in [c.symptom for c in later]
        before = ranked([complaint(symptom, since=2), complaint(fact, since=5)])
        assert (fact in [c.symptom for c in before]) is not (symptom in CAN_BLOW_UP)


CAN_BLOW_UP = (
    Symptom.BAD_STATE, Symptom.EXPLODING_ACTIVATIONS, Symptom.EXPLODING_GRADIENTS, Symptom.GRADIENTS_KEPT,
    Symptom.INDEX_OUT_OF_RANGE, Symptom.STEPS_TOO_LARGE, Symptom.UNSCALED_INPUT, Symptom.UPHILL_UPDATES,
)  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "guarded", "level"),
    [
        ([3.0, 2.0, float("nan"), 1.0], False, Level.NOTE),
        ([3.0, 2.0, 1.0, float("nan")], False, Level.FAULT),
        ([3.0, 2.0, 1.0, float("nan")], True, Level.NOTE),  # what follows a skip may not be measured
        ([3.0, 2.0, float("nan"), float("inf")], True, Level.FAULT),
        ([float("nan")], True, Level.FAULT),
    ],
)
def test_a_bad_batch_that_is_skipped_is_no_fault(losses, guarded, level):
    seen = [Loss(step, value) for step, value in enumerate(losses)]
    found = complaints(Course(framework="jax", losses=seen, guarded=guarded))
    assert [(c.symptom, c.level) for c in found] == [(Symptom.LOSS_NOT_FINITE, level)]


def test_facts_come_before_what_rests_on_a_threshold():
    found = ranked([complaint(Symptom.WRONG_AXIS), complaint(Symptom.RATE_ZERO), complaint(Symptom.DETACHED)])
    assert found[0].symptom is Symptom.RATE_ZERO


def test_a_cure_that_was_no_better_is_withdrawn_and_its_finding_moves_down():
    report = Checkup(
        complaints=(complaint(Symptom.STEPS_TOO_LARGE), complaint(Symptom.DEAD_UNITS)), steps=9, measured=9
    )
    refuted = report.with_refuted("with 0.1 times the rate, no better")
    first, second = refuted.complaints
    assert (first.symptom, second.symptom) == (Symptom.DEAD_UNITS, Symptom.STEPS_TOO_LARGE)
    assert (second.cure, second.level) == ("", Level.WARNING)
    text = str(refuted)
    assert "Cure: none is known; the usual one was tried." in text
    assert "tried: with 0.1 times the rate, no better" in text
    assert "not tried; expect:" in text  # of the other


@pytest.mark.parametrize(("last", "blamed"), [(4.0, True), (3.9, True), (5.2, False), (22.0, False)])
def test_small_steps_are_not_blamed_for_a_loss_that_rises(last, blamed):
    """It never says that steps are so small that the loss hardly changes, and that it rose by 395 %."""
    losses = [4.0 + (last - 4.0) * i / 23 for i in range(24)]
    still = course([1.0 - 1e-7 * i for i in range(24)], settings=(("SGD", {}),), losses=losses)
    assert (Symptom.STEPS_TOO_SMALL in [c.symptom for c in complaints(still)]) is blamed


@pytest.mark.parametrize(("factor", "found"), [(-3.0, True), (-1.1, False), (1.5, False)])
def test_an_objective_without_a_lower_bound_is_seen_while_all_is_finite(factor, found):
    losses = [factor**i if factor > 0 else -(abs(factor) ** i) for i in range(14)]
    run = course([1.0] * 14, settings=(("Adam", {}),), losses=losses)
    said = [c for c in complaints(run) if "no lower bound" in c.evidence[0] and "sign" in c.cure]
    assert bool(said) is found


@pytest.mark.parametrize(("each", "found"), [(1.0, True), (1.2, True), (1.9, False), (3.0, False)])
def test_an_objective_that_the_script_multiplies_by_more_and_more_has_a_lower_bound(each, found):
    """As a barrier method does; a number that grows slowly, such as a count, explains nothing."""
    losses = [-(3.0**i) for i in range(14)]
    run = course([1.0] * 14, settings=(("newton", {}),), losses=losses)
    run.numbers = [(step, {"t": each**step, "rate": 0.1}) for step in (0, 1, 10, 13)]
    assert any("no lower bound" in c.evidence[0] for c in complaints(run)) is found


@pytest.mark.parametrize(
    ("keys", "found"), [("aaaaaa", True), ("abcdef", False), ("aaaaab", False), ("aaa", False)]
)
def test_the_same_random_numbers_in_every_step_are_found(keys, found):
    probes = [
        Probe(step=i, parameters=(seen(1.0, 0.0),), drawn=(Drawn(k.encode(), None),))
        for i, k in enumerate(keys)
    ]
    run = Course(framework="jax", steps=len(keys), probes=probes)
    assert (Symptom.SAME_RANDOM_NUMBERS in [c.symptom for c in complaints(run)]) is found


def drawn_by(f, *args):
    return MeasuredCall.of(jax.make_jaxpr(f)(*args), jax.tree.leaves(args)).keys


def test_keys_are_read_whether_they_are_constants_arguments_or_derived():
    fixed = jax.random.key(3)
    constant = [drawn_by(lambda x: jax.random.normal(fixed, (2,)) + x, jnp.zeros(2)) for _ in range(2)]
    assert constant[0][0].key == constant[1][0].key
    passed = [drawn_by(lambda k: jax.random.normal(k, (2,)), jax.random.key(i)) for i in range(2)]
    assert passed[0][0].key != passed[1][0].key
    folded = [
        drawn_by(lambda i: jax.random.bernoulli(jax.random.fold_in(fixed, i), 0.5, (2,)), jnp.int32(i))
        for i in range(2)
    ]
    assert folded[0][0].key != folded[1][0].key
    assert "bernoulli" in folded[0][0].place.code


def complex_step(conjugate):
    def step(w):
        grads = jax.grad(lambda w: jnp.sum(jnp.abs(w - (1 + 2j)) ** 2))(w)
        return w - 0.1 * (jnp.conj(grads) if conjugate else grads)

    return step


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("conjugate", [True, False])
def test_complex_changes_are_compared_with_the_gradient_and_its_conjugate(conjugate, used):
    """Whether or not it is known what the optimizer has read, which the script may have conjugated."""
    w = jnp.array([0.5 + 0.3j, -1.0 + 0.1j])
    after = complex_step(conjugate)(w)
    grads = jax.grad(lambda w: jnp.sum(jnp.abs(w - (1 + 2j)) ** 2))(w)

    marked = {GRADIENT: {"w": SimpleNamespace(data=grads)}, PARAMETER: {}}
    marked |= {USED: {"w": SimpleNamespace(data=jnp.conj(grads) if conjugate else grads)}} if used else {}
    call = SimpleNamespace(inputs={"w": 0}, given=(w,), reached=frozenset({"w"}), marked=marked)
    (one,) = parameters_seen(call, [after], 0.1)
    assert (one.mirrored > 0.5) is not conjugate
    assert one.update > 0.1
    assert conjugate is (one.rise < -0.1)  # downhill
    run = Course(
        framework="jax",
        steps=4,
        probes=[Probe(step=i, parameters=(one,)) for i in range(4)],
        losses=[Loss(i, 4.0 + i) for i in range(4)],
    )
    found = [c for c in complaints(run) if "jnp.conj" in c.cure]
    assert bool(found) is not conjugate


# --- what a healthy method does that looks like a fault


def moved(name, weight, update, gradient=0.1, rise=-0.1):
    one = seen(weight, 0.0)
    return one._replace(name=name, update=update, gradient=gradient, rise=rise)


def run_of(steps, losses):
    """A training whose measured steps are given as the parameters of each, by the number of the step."""
    probes = [Probe(step=step, parameters=tuple(parameters)) for step, parameters in steps.items()]
    losses = [Loss(i, value) for i, value in enumerate(losses)]
    return Course(framework="torch", steps=len(losses), probes=probes, losses=losses)


def symptoms_of(run, above=Level.NOTE):
    return [c.symptom for c in complaints(run) if c.level >= above]


FEW_PERCENT = [2.0 - 0.002 * i for i in range(40)]  # a loss with a high floor


def adapter(step, rate):
    """The two factors of an adapter after so many steps of Adam's size, of which the second began at 0."""
    return moved("a", 0.12, rate if step else 0.0), moved("b", step * rate, rate)


@pytest.mark.parametrize(("rate", "blamed"), [(1e-2, False), (0.2, True)])
def test_weights_that_began_at_0_do_not_make_steps_too_large(rate, blamed):
    run = run_of({step: adapter(step, rate) for step in (0, 1, 2, 3, 5, 9, 20, 39)}, FEW_PERCENT)
    assert (Symptom.STEPS_TOO_LARGE in symptoms_of(run)) is blamed


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_weights_that_began_at_0_and_are_thrown_to_and_fro_are_found(factor):
    """Each step takes them to the other side of the best ones."""
    sizes = {0: 0.0} | {step: factor**step for step in (1, 2, 3, 5, 9, 20, 39)}
    run = run_of(
        {step: (moved("b", size, 2 * size or 1.0),) for step, size in sizes.items()}, [2.0] * 39 + [2.1]
    )
    assert Symptom.STEPS_TOO_LARGE in symptoms_of(run)


@pytest.mark.parametrize(
    ("update", "pulls", "blamed"),
    [
        (1e-2, (0.3, 0.2, 0.1, 0.0), False),  # a surrogate, until all is solved
        (1e-2, (0.3, 0.3, 0.3, 0.3), True),  # a forward pass that is not repeated
        (0.0, (0.3, 0.2, 0.1, 0.0), True),  # parameters that do not move
        (1e-2, (0.0, 0.0, 0.0, 0.0), True),  # nothing that the loss depends on
    ],
)
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_loss_that_is_constant_by_construction_is_not_blamed(value, update, pulls, blamed):
    steps = {i: (moved("w", 1.0, update, pull, -update * pull),) for i, pull in enumerate(pulls)}
    run = run_of(steps, [value] * 20)
    assert (Symptom.LOSS_CONSTANT in symptoms_of(run)) is blamed
