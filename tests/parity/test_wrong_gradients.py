"""Derivatives that a script has written itself: wrong ones are named, what stands in for one is not."""

import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import stablenum_jax
import stablenum_torch
from stablenum.diagnosis.checkup.course import Course, Probe
from stablenum.diagnosis.checkup.ranking import complaints
from stablenum.diagnosis.checkup.symptoms import Symptom
from stablenum.diagnosis.replay.trace import Trace
from tests.checkups import checked
from tests.selection import REPEATS, only


def torch_function(forward, backward):
    """A function that saves its inputs, and gives ``backward(g, *inputs)`` as their derivatives."""

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.save_for_backward(*inputs)
            return forward(torch, *inputs)

        @staticmethod
        def backward(ctx, g):
            return backward(torch, g, *ctx.saved_tensors)

    return Custom.apply


def jax_function(forward, backward):
    """The same in JAX."""

    @jax.custom_vjp
    def custom(*inputs):
        return forward(jnp, *inputs)

    def bwd(inputs, g):
        found = backward(jnp, g, *inputs)
        return found if isinstance(found, tuple) else (found,)

    custom.defvjp(lambda *inputs: (forward(jnp, *inputs), inputs), bwd)
    return custom


def complaints_torch(function, inputs=1):
    """What the checkup of one batch says of a model that applies a function."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 8) for _ in range(inputs)), torch.nn.Linear(8, 1))

    def loss_fn(model, x):
        h = [layer(x) for layer in model[:inputs]]
        return (model[inputs](function(*h)) - x[:, :1]).square().mean()

    return stablenum_torch.checkup(model, loss_fn, torch.randn(16, 4)).complaints


def complaints_jax(function, inputs=1):
    """The same in JAX."""
    keys = jax.random.split(jax.random.key(0), inputs + 2)
    params = [jax.random.normal(k, (4, 8)) / 2 for k in keys[:inputs]]

    def loss_fn(params, x):
        h = [x @ w for w in params[:inputs]]
        return jnp.mean((function(*h) @ params[inputs] - x[:, :1]) ** 2)

    params.append(jax.random.normal(keys[inputs], (8, 1)))
    return stablenum_jax.checkup(loss_fn, params, jax.random.normal(keys[-1], (16, 4))).complaints


def sig(xp, x):
    return 1 / (1 + xp.exp(-x))


def whole(xp, x):
    """The largest of each row, as a column."""
    return xp.max(x, axis=-1, keepdims=True) if xp is jnp else xp.max(x, dim=-1, keepdim=True).values


def swish(xp, x):
    return x * sig(xp, x)


WRONG = {
    "twice as large": (lambda xp, x: xp.tanh(x), lambda xp, g, x: 2 * g * (1 - xp.tanh(x) ** 2)),
    "the other way": (lambda xp, x: x**3, lambda xp, g, x: -3 * g * x * x),
    "a term is missing": (swish, lambda xp, g, x: g * sig(xp, x)),
    "exactly 0": (lambda xp, x: xp.sin(x), lambda xp, g, x: 0 * g),
    "of a row": (lambda xp, x: x - whole(xp, x) + xp.exp(x), lambda xp, g, x: 0.3 * g + 0 * x),
    "a factor that is forgotten": (
        lambda xp, x: 5 * xp.exp(-x * x),
        lambda xp, g, x: -2 * g * x * xp.exp(-x * x),
    ),
}
WRONG_OF_TWO = {
    "exchanged": (lambda xp, x, y: x * xp.exp(y), lambda xp, g, x, y: (g * x * xp.exp(y), g * xp.exp(y))),
    "one doubled": (lambda xp, x, y: x * y, lambda xp, g, x, y: (g * y, 2 * g * x)),
}
MEANT = {
    "a straight-through rounding": (lambda xp, x: xp.round(x), lambda xp, g, x: g),
    "a surrogate of a spike": (lambda xp, x: 1.0 * (x > 0), lambda xp, g, x: g / (1 + abs(x)) ** 2),
    "a sign whose gradient is clipped": (lambda xp, x: xp.sign(x), lambda xp, g, x: g * (abs(x) < 1)),
    "a bound that lets gradients through": (lambda xp, x: xp.clip(x, -0.3, 0.3), lambda xp, g, x: g),
    "a reversal": (lambda xp, x: x * 1, lambda xp, g, x: -0.3 * g),
    "a scale": (lambda xp, x: x * 1, lambda xp, g, x: 100 * g),
    "a clipped gradient": (lambda xp, x: x * 1, lambda xp, g, x: xp.clip(g, -1e-3, 1e-3)),
    "a sign with a scale": (lambda xp, x: xp.sign(x) * abs(x).mean(), lambda xp, g, x: g),
    "a reversal that reshapes": (lambda xp, x: x.reshape(-1, 8), lambda xp, g, x: -0.5 * g.reshape(x.shape)),
    "a derivative that is clipped": (lambda xp, x: x * x, lambda xp, g, x: xp.clip(2 * g * x, -1e-3, 1e-3)),
    "a right one": (swish, lambda xp, g, x: g * (sig(xp, x) * (1 + x * (1 - sig(xp, x))))),
    "an implicit one": (
        lambda xp, x: _fixed_point(xp, x),
        lambda xp, g, x: g / (1 + 0.5 * xp.sin(_fixed_point(xp, x))),
    ),
    "a gradient that does not vanish": (
        lambda xp, x: xp.clip(x, 0, None) if xp is jnp else xp.clip(x, 0),
        lambda xp, g, x: g * ((x > 0) + 0.1 * (x <= 0)),
    ),
}
MEANT_OF_TWO = {
    "a learned step size": (
        lambda xp, x, s: xp.round(x / (abs(s) + 1)) * (abs(s) + 1),
        lambda xp, g, x, s: (g, g * (xp.round(x / (abs(s) + 1)) - x / (abs(s) + 1)) * xp.sign(s)),
    ),
    "one that nobody asks for": (
        lambda xp, x, y: x * xp.exp(y) if xp is jnp else x * y,
        lambda xp, g, x, y: (g * xp.exp(y), None) if xp is jnp else (g * y, g * x),
    ),
    "right ones": (lambda xp, x, y: x * xp.exp(y), lambda xp, g, x, y: (g * xp.exp(y), g * x * xp.exp(y))),
}


def _fixed_point(xp, x):
    z = 0 * x
    for _ in range(60):
        z = 0.5 * xp.cos(z) + x
    return z


def cases(one, two):
    """Each function in both frameworks; the second one is left to the slow parts where it costs."""
    for inputs, table in ((1, one), (2, two)):
        for name, pair in table.items():
            yield pytest.param(complaints_torch, torch_function(*pair), inputs, id=f"torch {name}")
            marks = [REPEATS] if name in list(table)[2:] else []
            yield pytest.param(complaints_jax, jax_function(*pair), inputs, id=f"jax {name}", marks=marks)


@pytest.mark.parametrize(("run", "function", "inputs"), list(cases(WRONG, WRONG_OF_TWO)))
def test_a_derivative_of_another_function_is_named(run, function, inputs):
    first = run(function, inputs)[0]
    assert first.symptom is Symptom.WRONG_GRADIENT
    assert first.place.file == __file__
    assert "return" in first.place.code


@pytest.mark.parametrize(("run", "function", "inputs"), list(cases(MEANT, MEANT_OF_TWO)))
def test_a_derivative_that_stands_in_for_another_is_not_blamed(run, function, inputs):
    assert Symptom.WRONG_GRADIENT not in [c.symptom for c in run(function, inputs)]


class Numpy(torch.autograd.Function):
    factor = 1.0

    @staticmethod
    def forward(x):
        return torch.from_numpy(np.sinh(x.detach().numpy()))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.x = inputs[0]

    @staticmethod
    def backward(ctx, g):
        return Numpy.factor * g * torch.cosh(ctx.x)


def callback(factor):
    """A function of NumPy in JAX."""

    @jax.custom_vjp
    def sinh(x):
        return jax.pure_callback(np.sinh, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    sinh.defvjp(lambda x: (sinh(x), x), lambda x, g: (factor * g * jnp.cosh(x),))
    return sinh


@pytest.mark.parametrize("factor", [1.0, 1.5])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_function_that_leaves_the_framework_is_compared_by_its_slope(framework, factor, monkeypatch):
    monkeypatch.setattr(Numpy, "factor", factor)
    found = complaints_torch(Numpy.apply) if framework == "torch" else complaints_jax(callback(factor))
    assert (Symptom.WRONG_GRADIENT in [c.symptom for c in found]) is (factor != 1)


class WithSum(torch.autograd.Function):
    """A function whose second output the training does not use, and whose derivative leaves it out."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp(), 50 * x.sum()

    @staticmethod
    def backward(ctx, g, of_sum):
        return g * ctx.saved_tensors[0].exp()


def with_sum():
    """The same in JAX."""

    @jax.custom_vjp
    def exp(x):
        return jnp.exp(x), 50 * jnp.sum(x)

    exp.defvjp(lambda x: (exp(x), x), lambda x, g: (g[0] * jnp.exp(x),))
    return exp


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_function_of_which_one_output_is_used_is_not_blamed(framework):
    if framework == "torch":
        found = complaints_torch(lambda x: WithSum.apply(x)[0])
    else:
        found = complaints_jax(lambda x: with_sum()(x)[0])
    assert Symptom.WRONG_GRADIENT not in [c.symptom for c in found]


class Forgetful(torch.autograd.Function):
    """A square whose backward pass takes what it is given for 1."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0]


def forgetful():
    """The same in JAX."""

    @jax.custom_vjp
    def square(x):
        return x * x

    square.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x,))
    return square


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_derivative_is_judged_by_what_the_training_asks_of_it(reduction):
    def loss_fn(model, x):
        return getattr(Forgetful.apply(model(x) - x[:, :1]), reduction)()

    found = stablenum_torch.checkup(torch.nn.Linear(4, 1), loss_fn, torch.randn(16, 4)).complaints
    assert (Symptom.WRONG_GRADIENT in [c.symptom for c in found]) is (reduction == "mean")


def test_a_derivative_that_may_be_what_the_training_asks_for_is_not_blamed():
    square = forgetful()
    params = {"w": jnp.full((4, 1), 0.3)}
    x = jax.random.normal(jax.random.key(0), (16, 4))
    found = stablenum_jax.checkup(lambda p, x: square(x @ p["w"] - x[:, :1]).sum(), params, x).complaints
    assert Symptom.WRONG_GRADIENT not in [c.symptom for c in found]


class Reversible(torch.autograd.Function):
    """A layer that frees what it has saved, and computes it again from its output."""

    @staticmethod
    def forward(ctx, x):
        y = torch.sinh(x)
        kept = x.clone()
        ctx.save_for_backward(kept, y)
        kept.untyped_storage().resize_(0)
        return y.clone()

    @staticmethod
    def backward(ctx, g):
        kept, y = ctx.saved_tensors
        kept.untyped_storage().resize_(y.untyped_storage().nbytes())
        kept.copy_(torch.asinh(y))
        return g * torch.cosh(kept)


def test_a_layer_that_computes_its_input_again_is_not_blamed():
    assert Symptom.WRONG_GRADIENT not in [c.symptom for c in complaints_torch(Reversible.apply)]


class Sinh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sinh(x)

    @staticmethod
    def backward(ctx, g):
        return g * torch.cosh(ctx.saved_tensors[0])


@pytest.mark.parametrize(("factor", "blamed"), [(1.0, False), (1.01, True)])
def test_what_a_later_layer_computes_again_may_differ_by_rounding(factor, blamed):
    def layer(x):
        y = Sinh.apply(x)

        def write(g):
            x.data.copy_(factor * torch.asinh(torch.sinh(x.data)))

        y.register_hook(write)
        return y

    found = [c.symptom for c in complaints_torch(layer)]
    assert (Symptom.WRONG_GRADIENT in found) is blamed


class Talking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        other = threading.Thread(target=print, args=("from elsewhere",))
        other.start()
        other.join()
        sys.stdout.write("from here\n")
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        return g


def test_what_other_threads_print_is_not_lost(capsys):
    complaints_torch(Talking.apply)
    printed = capsys.readouterr().out.splitlines()
    assert printed.count("from elsewhere") > printed.count("from here") > 0


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = (torch.rand_like(x) > 0.5) * 2.0
        return x * ctx.kept

    @staticmethod
    def backward(ctx, g):
        return g * ctx.kept


class Counting(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        Counting.calls += 1
        return x * Counting.calls

    @staticmethod
    def backward(ctx, g):
        return g


def test_random_numbers_are_drawn_again_and_left_as_they_were():
    torch.manual_seed(3)
    plain = [torch.rand(1) for _ in range(2)]
    torch.manual_seed(3)
    first = torch.rand(1)
    state = torch.get_rng_state()
    assert not complaints_torch(Noise.apply)
    torch.set_rng_state(state)
    assert [first, torch.rand(1)] == plain


def test_a_function_that_gives_other_numbers_each_time_is_not_judged():
    assert Symptom.WRONG_GRADIENT not in [c.symptom for c in complaints_torch(Counting.apply)]


def test_a_rule_for_forward_derivatives_and_for_examples_is_compared():
    @jax.custom_jvp
    def root(x):
        return jnp.sqrt(1 + x * x)

    root.defjvp(lambda p, t: (root(*p), t[0] * p[0]))
    first = complaints_jax(jax.vmap(root))[0]
    assert first.symptom is Symptom.WRONG_GRADIENT
    assert "root" in first.evidence[0]


FLAT = """
import torch
torch.manual_seed(0)
class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()
    @staticmethod
    def backward(ctx, g):
        return 0 * g
a, b = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
opt = torch.optim.Adam([*a.parameters(), *b.parameters()], 1e-2)
for i in range(40):
    x = torch.randn(64, 4)
    loss = (b(Sign.apply(a(x))) - x[:, :1]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
FLAT_IN_JAX = """
import jax, jax.numpy as jnp, optax
@jax.custom_vjp
def sign(x):
    return jnp.sign(x)
def bwd(_, g):
    return (0 * g,)
sign.defvjp(lambda x: (jnp.sign(x), None), bwd)
p = {"a": jax.random.normal(jax.random.key(0), (4, 8)), "b": jax.random.normal(jax.random.key(1), (8, 1))}
tx = optax.adam(1e-2)
state = tx.init(p)
@jax.jit
def train(p, state, x):
    loss, g = jax.value_and_grad(lambda p: jnp.mean((sign(x @ p["a"]) @ p["b"] - x[:, :1]) ** 2))(p)
    up, state = tx.update(g, state)
    return optax.apply_updates(p, up), state, loss
for i in range(40):
    p, state, loss = train(p, state, jax.random.normal(jax.random.key(i), (64, 4)))
"""


@pytest.mark.parametrize("text", [FLAT, FLAT_IN_JAX], ids=["torch", "jax"])
def test_a_rule_that_makes_a_gradient_exactly_0_is_named(text, tmp_path):
    result, report = checked(text, tmp_path, "--once")
    first = report["complaints"][0]
    assert first["symptom"] == "zero_gradient", result.stdout + result.stderr
    assert "sign returns is exactly 0" in first["evidence"][1].lower()
    assert "return" in first["place"]["code"]


SAVING = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x
    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]
torch.manual_seed(0)
model = nn.Linear(8, 1)
opt = torch.optim.SGD(model.parameters(), 1e-2)
kept = {{}}
def pack(t):
    kept[len(kept)] = t
    return len(kept) - 1
for step in range(12):
    x = torch.randn(16, 8)
    {body}
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())
"""
SAVED = {
    "checkpoint": "loss = checkpoint(lambda x: Square.apply(model(x)).mean(), x, use_reentrant=False)",
    "hooks": "with torch.autograd.graph.saved_tensors_hooks(pack, kept.pop):\n"
    "        loss = Square.apply(model(x)).mean()",
    "a checkup inside": "import stablenum_torch\n"
    "    stablenum_torch.checkup(model, lambda m, x: Square.apply(m(x)).mean(), x) if step == 1 else None\n"
    "    loss = Square.apply(model(x)).mean()",
}


@pytest.mark.parametrize("body", SAVED.values(), ids=SAVED)
def test_a_script_ends_as_it_does_without_a_checkup(body, tmp_path):
    result, report = checked(SAVING.format(body=body), tmp_path, "--once")
    plain = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True
    )
    assert result.stdout.splitlines()[0] == plain.stdout.strip(), result.stdout + result.stderr
    assert "wrong_gradient" not in [c["symptom"] for c in report["complaints"]]
    assert "watching failed" not in result.stderr


TRANSPOSED = """
import jax, jax.numpy as jnp, optax
@jax.custom_jvp
def double(x):
    return 2 * x
double.defjvp(lambda p, t: (double(*p), double(*t)))
w = jax.random.normal(jax.random.key(1), (4,))
tx = optax.adam(1e-2)
state = tx.init(w)
@jax.jit
def train(w, state, x):
    def loss_fn(w):
        pulled, = jax.linear_transpose(lambda v: double(x @ v), w)(x @ w)
        return jnp.mean(pulled ** 2)
    loss, g = jax.value_and_grad(loss_fn)(w)
    up, state = tx.update(g, state)
    return optax.apply_updates(w, up), state, loss
for i in range(6):
    w, state, loss = train(w, state, jax.random.normal(jax.random.key(i), (8, 4)))
"""


def test_a_script_may_transpose_a_function_that_is_watched(tmp_path):
    result, report = checked(TRANSPOSED, tmp_path, "--once")
    assert result.returncode == 0, result.stdout + result.stderr
    assert report["complaints"] == []


HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for i in range(12):
    x = torch.randn(64, 8)
    opt.zero_grad()
    h = net[:2](x)
    out = net[2](h)
    {}
    opt.step()
"""
LOSS = "loss = (out - x[:, :1]).square().mean()"
DAMAGED = {
    "h.data.mul_(-1.0); {loss}; loss.backward()": "h.data.mul_(-1.0)",
    "{loss}; loss.backward(retain_graph=True); (loss + out.abs().mean()).backward()": "out.abs().mean()",
    "{loss}; loss.backward(retain_graph=True); loss.backward()": "loss.backward()",
}
CHECKPOINTED = """import torch.utils.checkpoint as c
    part = lambda x: nn.functional.relu_(net[0](x)).square().mean()
    c.checkpoint(part, x, use_reentrant=False).backward()"""
UNDAMAGED = [
    "{loss}; loss.backward(retain_graph=True); opt.zero_grad(); (loss + out.abs().mean()).backward()",
    "{loss}; loss.backward(retain_graph=True); out.abs().mean().backward()",
    "{loss}; torch.autograd.grad(loss, h, retain_graph=True); loss.backward()",
    "out.data.mul_(2.0); {loss}; loss.backward()",
    CHECKPOINTED,
]


def symptoms(text, folder):
    result, report = checked(HEAD.format(text.format(loss=LOSS)), folder, "--once")
    assert "watching failed" not in result.stderr, result.stderr
    return report["complaints"], result.stdout


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_what_autograd_does_not_know_of_is_found(text, tmp_path):
    found, said = symptoms(text, tmp_path)
    assert found[0]["symptom"] == "wrong_gradient", said
    assert DAMAGED[text] in found[0]["place"]["code"]


@pytest.mark.parametrize("recomputed", [False, True])
def test_what_a_backward_pass_computes_again_is_no_late_write(recomputed):
    trace = Trace()
    x, y, g, new, back = (trace.add_value() for _ in range(5))
    trace.add_step("mul", inputs=[x], outputs=[y])
    write = {"operation": "relu", "inputs": [x], "outputs": [new], "primitive": "aten.relu_.default"}
    if not recomputed:
        trace.add_step(**write)
    trace.add_step("mean", inputs=[y], outputs=[g], phase="backward")
    if recomputed:
        trace.add_step(**write)
    trace.add_step("mul", inputs=[g, new], outputs=[back], phase="backward", forward=0)
    found = complaints(
        Course(framework="torch", probes=[Probe(step=0, trace=trace, signals={}, parameters=())])
    )
    assert (Symptom.WRONG_GRADIENT in [c.symptom for c in found]) is not recomputed


@pytest.mark.parametrize("text", only(UNDAMAGED[2::2], UNDAMAGED), ids=range(len(UNDAMAGED)))
def test_what_autograd_allows_for_is_not_blamed(text, tmp_path):
    found, said = symptoms(text, tmp_path)
    assert "wrong_gradient" not in [c["symptom"] for c in found], said


DEVICES = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, optax
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
xs = jax.random.normal(jax.random.key(0), (16, 3))
params = jnp.zeros(3)
tx = optax.sgd(0.02)
state = tx.init(params)
def loss(p, x):
    return jnp.mean((x @ p - x.sum(-1)) ** 2)
def grads(params, xs):
    {body}
@jax.jit
def step(params, state):
    parts = jax.shard_map(grads, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    up, state = tx.update(parts(params, xs), state)
    return optax.apply_updates(params, up), state
for i in range(6):
    params, state = step(params, state)
"""
OVER_DEVICES = {
    "return jax.lax.pmean(jax.vmap(jax.grad(loss), (None, 0))(params, xs).mean(0), 'data')": "fault",
    "return jax.lax.psum(jax.grad(loss)(params, xs), 'data')": "fault",
    "return jax.lax.pmean(jax.grad(loss)(params, xs), 'data')": "warning",
    "return jax.grad(loss)(params, xs) / 2": "",
    "return jax.grad(lambda p: jax.lax.pmean(loss(p, xs), 'data'))(params)": "",
    "own = jax.lax.pcast(params, ('data',), to='varying')\n"
    "    return jax.lax.pmean(jax.vmap(jax.grad(loss), (None, 0))(own, xs).mean(0), 'data')": "",
}


# One sum too many, one mean too many, and a derivative for each device on purpose; the others vary these.
SOME = [1, 2, 5]
BODIES = [
    pytest.param(body, id=str(i), marks=[] if i in SOME else [REPEATS]) for i, body in enumerate(OVER_DEVICES)
]


@pytest.mark.parametrize("body", BODIES)
def test_gradients_that_shard_map_has_summed_are_found(body, tmp_path):
    result, report = checked(DEVICES.format(body=body), tmp_path, "--once")
    assert report, result.stderr
    found = [c for c in report["complaints"] if c["symptom"] == "wrong_gradient"]
    assert [c["level"] for c in found] == [OVER_DEVICES[body]] * bool(OVER_DEVICES[body]), result.stdout
    assert not found or "jax.grad(loss)" in found[0]["place"]["code"]
