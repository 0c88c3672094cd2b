import equinox as eqx
import diffrax
import jax
import jax.numpy as jnp
import jax.random as jr
import optax


class Friction(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(1, 1, width_size=8, depth=1, activation=jnp.tanh, key=key)

    def __call__(self, v):
        return 0.1 * self.mlp(v[None])[0]


class Oscillator(eqx.Module):
    """Driven oscillator: known structure, unknown stiffness / drive, learned friction."""
    stiffness: float
    drive: float
    friction: Friction

    def __call__(self, t, y, args):
        x, v = y
        return jnp.stack([v, -self.stiffness * x - self.friction(v) + self.drive * jnp.cos(1.3 * t)])


def solve(field, y0, ts):
    sol = diffrax.diffeqsolve(
        diffrax.ODETerm(field), diffrax.Tsit5(), ts[0], ts[-1], dt0=0.15, y0=y0,
        saveat=diffrax.SaveAt(ts=ts), stepsize_controller=diffrax.ConstantStepSize(),
    )
    return sol.ys


def true_field(t, y, args):
    x, v = y
    return jnp.stack([v, -2.4 * x - 0.15 * v - 0.05 * v * jnp.abs(v) + 0.8 * jnp.cos(1.3 * t)])


key = jr.PRNGKey(0)
k_init, k_train, k_val, k_batch = jr.split(key, 4)
ts = jnp.linspace(0.0, 3.0, 13)
make = lambda k, n: jr.uniform(k, (n, 2), minval=-1.5, maxval=1.5)
y0_train, y0_val = make(k_train, 128), make(k_val, 64)
train = jax.vmap(lambda y: solve(true_field, y, ts))(y0_train)
val = jax.vmap(lambda y: solve(true_field, y, ts))(y0_val)

model = Oscillator(stiffness=jnp.asarray(1.5), drive=jnp.asarray(0.2), friction=Friction(k_init))
optim = optax.adam(1.5e-2)
opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))


def mse(model, ys):
    pred = jax.vmap(lambda y: solve(model, y, ts))(ys[:, 0])
    return jnp.mean((pred - ys) ** 2)


@eqx.filter_jit
def make_step(model, opt_state, ys):
    loss, grads = eqx.filter_value_and_grad(mse)(model, ys)
    updates, opt_state = optim.update(grads, opt_state, model)
    return eqx.apply_updates(model, updates), opt_state, loss


for step in range(200):
    k_batch, k = jr.split(k_batch)
    batch = train[jr.choice(k, 128, (32,), replace=False)]
    model, opt_state, loss = make_step(model, opt_state, batch)
    if step % 20 == 0:
        print(f"step {step} loss {float(loss):.5f}")

print("stiffness", float(model.stiffness), "drive", float(model.drive))
print("FINAL", float(mse(model, val)))
