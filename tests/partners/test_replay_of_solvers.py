"""Programs of diffrax, optimistix, lineax, equinox, distrax and numpyro, replayed.

Whatever loops, callbacks and primitives they are made of, a sound step is found sound, and a bad one is
explained: none is a failure of ours.
"""

import warnings

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpyro.distributions as dist
import numpyro.infer.util
import optimistix as optx
import pytest
from equinox.internal import while_loop

import stablenum_jax
from stablenum.diagnosis import Cause
from tests.selection import REPEATS

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of the probability library that distrax imports
    import distrax

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def solved(saveat=None, *, solver=None, adjoint=None, controller=None, event=None, term=None):
    """Return the sum of the squares of a solution of an equation with rate ``t``."""
    options = {"saveat": saveat or diffrax.SaveAt(t1=True)}
    options |= {} if adjoint is None else {"adjoint": adjoint}
    options |= {} if controller is None else {"stepsize_controller": controller}
    options |= {} if event is None else {"event": event}

    def f(t):
        equation = term or diffrax.ODETerm(lambda time, y, rate: -rate * y)
        solution = diffrax.diffeqsolve(
            equation, solver or diffrax.Tsit5(), 0.0, 1.0, 0.25, jnp.ones(2), args=t, **options
        )
        return jnp.sum(jnp.where(jnp.isfinite(solution.ys), solution.ys, 0.0) ** 2)

    return f


TIMES = diffrax.SaveAt(ts=jnp.linspace(0.0, 1.0, 4))
STEPS = diffrax.PIDController(1e-2, 1e-2)
NOISE = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-2, (2,), jax.random.key(0))
SDE = diffrax.MultiTerm(
    diffrax.ODETerm(lambda time, y, rate: -rate * y),
    diffrax.ControlTerm(lambda time, y, rate: 0.1 * jnp.eye(2), NOISE),
)
MATRIX = jnp.array([[3.0, 1.0], [1.0, 2.0]])
PROGRAMS = {
    "diffrax t1": solved(),
    "diffrax ts": solved(TIMES),
    "diffrax steps": solved(diffrax.SaveAt(steps=True)),
    "diffrax dense": lambda t: diffrax.diffeqsolve(
        diffrax.ODETerm(lambda time, y, rate: -rate * y), diffrax.Tsit5(), 0.0, 1.0, 0.25, 1.0, args=t,
        saveat=diffrax.SaveAt(dense=True),
    ).evaluate(0.5),
    "diffrax adaptive": solved(TIMES, controller=STEPS),
    "diffrax backsolve": solved(TIMES, adjoint=diffrax.BacksolveAdjoint()),
    "diffrax direct": solved(TIMES, adjoint=diffrax.DirectAdjoint()),
    "diffrax Heun": solved(TIMES, solver=diffrax.Heun()),
    "diffrax implicit": solved(solver=diffrax.Kvaerno3(), controller=STEPS),
    "diffrax reversible": solved(solver=diffrax.ReversibleHeun()),
    "diffrax event": solved(event=diffrax.Event(lambda t, y, args, **kw: y[0] < 0.5)),
    "diffrax noise": solved(TIMES, solver=diffrax.EulerHeun(), term=SDE),
    "optimistix Newton": lambda t: optx.root_find(
        lambda y, a: y**2 - a, optx.Newton(1e-4, 1e-4), jnp.asarray(1.0), args=t).value,
    "optimistix Chord": lambda t: optx.root_find(
        lambda y, a: y**2 - a, optx.Chord(1e-4, 1e-4), jnp.asarray(1.0), args=t).value,
    "optimistix bisection": lambda t: optx.root_find(
        lambda y, a: y**3 - a, optx.Bisection(1e-4, 1e-4), jnp.asarray(1.0), args=t,
        options={"lower": 0.0, "upper": 3.0}).value,
    "optimistix BFGS": lambda t: optx.minimise(
        lambda y, a: (y - a) ** 2, optx.BFGS(1e-4, 1e-4), jnp.asarray(1.0), args=t).value,
    "optimistix gradient descent": lambda t: optx.minimise(
        lambda y, a: (y - a) ** 2, optx.GradientDescent(0.3, 1e-3, 1e-3), jnp.asarray(1.0), args=t).value,
    "optimistix Nelder-Mead": lambda t: optx.minimise(
        lambda y, a: jnp.sum((y - a) ** 2), optx.NelderMead(1e-2, 1e-2), jnp.ones(2), args=t).value.sum(),
    "optimistix Levenberg-Marquardt": lambda t: optx.least_squares(
        lambda y, a: y - a, optx.LevenbergMarquardt(1e-4, 1e-4), jnp.ones(2), args=t).value.sum(),
    "optimistix Gauss-Newton": lambda t: optx.least_squares(
        lambda y, a: y**2 - a, optx.GaussNewton(1e-4, 1e-4), jnp.ones(2), args=t).value.sum(),
    "optimistix fixed point": lambda t: optx.fixed_point(
        lambda y, a: 0.5 * jnp.cos(y) * a, optx.FixedPointIteration(1e-4, 1e-4), jnp.asarray(0.5),
        args=t).value,
    "lineax LU": lambda t: lx.linear_solve(lx.MatrixLinearOperator(MATRIX * t), jnp.ones(2)).value.sum(),
    "lineax Cholesky": lambda t: lx.linear_solve(
        lx.MatrixLinearOperator(MATRIX * t, lx.positive_semidefinite_tag), jnp.ones(2)).value.sum(),
    "lineax CG": lambda t: lx.linear_solve(
        lx.MatrixLinearOperator(MATRIX * t, lx.positive_semidefinite_tag), jnp.ones(2),
        lx.CG(1e-4, 1e-4)).value.sum(),
    "lineax GMRES": lambda t: lx.linear_solve(
        lx.MatrixLinearOperator(MATRIX * t), jnp.ones(2), lx.GMRES(1e-4, 1e-4)).value.sum(),
    "lineax QR": lambda t: lx.linear_solve(
        lx.MatrixLinearOperator(jnp.ones((3, 2)).at[0, 0].set(t)), jnp.ones(3), lx.QR()).value.sum(),
    "lineax SVD": lambda t: lx.linear_solve(
        lx.MatrixLinearOperator(MATRIX * t), jnp.ones(2), lx.SVD()).value.sum(),
    "lineax tridiagonal": lambda t: lx.linear_solve(
        lx.TridiagonalLinearOperator(jnp.ones(3) * t * 3, jnp.ones(2), jnp.ones(2)), jnp.ones(3)).value.sum(),
    "lineax Jacobian": lambda t: lx.linear_solve(
        lx.JacobianLinearOperator(lambda y, a: jnp.tanh(y) + y * t, jnp.ones(2)), jnp.ones(2)).value.sum(),
    "equinox checkpointed loop": lambda t: while_loop(
        lambda c: c[1] < 5, lambda c: (c[0] * t, c[1] + 1), (jnp.asarray(1.0), 0), kind="checkpointed",
        max_steps=8)[0],
    "equinox bounded loop": lambda t: while_loop(
        lambda c: c[1] < 5, lambda c: (c[0] * t, c[1] + 1), (jnp.asarray(1.0), 0), kind="bounded",
        max_steps=8)[0],
    "equinox MLP": lambda t: eqx.nn.MLP(2, 1, 8, 2, key=jax.random.key(0))(jnp.ones(2) * t).sum(),
    "equinox GRU": lambda t: eqx.nn.GRUCell(2, 4, key=jax.random.key(0))(jnp.ones(2) * t, jnp.zeros(4)).sum(),
    "equinox attention": lambda t: eqx.nn.MultiheadAttention(2, 4, key=jax.random.key(0))(
        *[jnp.ones((3, 4)) * t] * 3).sum(),
    "equinox error_if": lambda t: eqx.error_if(t * 2, t > 5.0, "too large"),
    "equinox filter_checkpoint": lambda t: eqx.filter_checkpoint(lambda x: jnp.sin(x) * t)(t),
    "equinox closure_convert": lambda t: eqx.filter_closure_convert(lambda x: jnp.sin(x) * t, t)(t),
    "distrax normal": lambda t: -distrax.Normal(t, 1.0).log_prob(jnp.asarray(0.3)),
    "distrax tanh": lambda t: distrax.Transformed(distrax.Normal(t, 1.0), distrax.Tanh()).sample_and_log_prob(
        seed=jax.random.key(0))[1],
    "distrax spline": lambda t: distrax.RationalQuadraticSpline(
        jnp.ones(10) * t, -2.0, 2.0).forward(jnp.asarray(0.4)),
    "distrax mixture": lambda t: distrax.MixtureSameFamily(
        distrax.Categorical(jnp.zeros(2)), distrax.Normal(jnp.array([0.0, 1.0]) * t, jnp.ones(2))
    ).log_prob(jnp.asarray(0.2)),
    "numpyro normal": lambda t: dist.Normal(t, 1.0).log_prob(0.3),
    "numpyro Dirichlet": lambda t: dist.Dirichlet(jnp.ones(3) * t).log_prob(jnp.ones(3) / 3),
    "numpyro LKJ": lambda t: dist.LKJCholesky(3, t).log_prob(jnp.eye(3)),
    "numpyro gamma sample": lambda t: dist.Gamma(t, 1.0).sample(jax.random.key(0)),
    "numpyro model": lambda t: numpyro.infer.util.log_density(
        lambda: numpyro.sample("x", dist.Normal(0.0, 1.0)), (), {}, {"x": t})[0],
}  # fmt: skip
FAST = ("equinox checkpointed loop", "lineax CG", "optimistix Newton")


def cases():
    return [pytest.param(name, marks=[] if name in FAST else [REPEATS]) for name in PROGRAMS]


@pytest.mark.parametrize("name", cases())
def test_a_sound_program_is_replayed_and_found_sound(name):
    report = stablenum_jax.replay(PROGRAMS[name], jnp.asarray(1.3))
    assert report.ok, str(report)
    assert report.evidence.loss_finite


@pytest.mark.parametrize("name", cases())
def test_a_bad_number_in_the_same_program_is_explained(name):
    """The logarithm of a number below 0, which the result is multiplied by, is the cause in each of them.

    Its derivative is left out: lineax refuses to solve for a gradient that is not finite.
    """

    def step(t):
        return jax.lax.stop_gradient(PROGRAMS[name](t)) * jnp.log(t - 2.0)

    report = stablenum_jax.replay(step, jnp.asarray(1.3))
    assert report.verdict.cause is Cause.DOMAIN, str(report)
    assert report.findings[0].operation == "log"
    assert report.findings[0].place.code.endswith("jnp.log(t - 2.0)")
