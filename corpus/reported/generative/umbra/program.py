import equinox as eqx
import jax
import jax.numpy as jnp
import optax

jax.config.update("jax_enable_x64", True)

# -u'' = f on (-1, 1), u(-1) = u(1) = 0, manufactured solution
exact = lambda x: jnp.sin(jnp.pi * x) * jnp.exp(-x ** 2) + 0.3 * jnp.sin(3 * jnp.pi * x)
rhs = lambda x: -jax.grad(jax.grad(exact))(x)


class Field(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.mlp = eqx.nn.MLP("scalar", "scalar", width_size=32, depth=3, activation=jnp.tanh, key=key)

    def __call__(self, x):
        return self.mlp(x)


model = Field(jax.random.PRNGKey(2))
params, static = eqx.partition(model, eqx.is_inexact_array)
params = jax.tree.map(lambda a: a.astype(jnp.float64), params)
colloc = jnp.linspace(-1, 1, 128)
f_vals = jax.vmap(rhs)(colloc)


def loss_fn(params):
    u = eqx.combine(params, static)
    u_xx = jax.vmap(jax.grad(jax.grad(u)))(colloc)
    residual = -u_xx - f_vals
    boundary = u(jnp.array(-1.0)) ** 2 + u(jnp.array(1.0)) ** 2
    return jnp.mean(residual ** 2) + 100.0 * boundary


grid = jnp.linspace(-1, 1, 401)


def rel_error(params):
    u = jax.vmap(eqx.combine(params, static))(grid)
    ref = jax.vmap(exact)(grid)
    return float(jnp.linalg.norm(u - ref) / jnp.linalg.norm(ref))


adam = optax.adam(2e-3)


@jax.jit
def adam_step(params, state):
    loss, g = jax.value_and_grad(loss_fn)(params)
    up, state = adam.update(g, state)
    return optax.apply_updates(params, up), state, loss


lbfgs = optax.lbfgs(memory_size=30)
value_and_grad = optax.value_and_grad_from_state(loss_fn)


@jax.jit
def lbfgs_step(params, state):
    value, grad = value_and_grad(params, state=state)
    up, state = lbfgs.update(grad, state, params, value=value, grad=grad, value_fn=loss_fn)
    return optax.apply_updates(params, up), state, value


state = adam.init(params)
for it in range(100):
    params, state, loss = adam_step(params, state)
    if it % 20 == 0:
        print(f"adam  {it:3d} loss {float(loss):.4e} rel. error {rel_error(params):.3e}")

state = lbfgs.init(params)
for it in range(250):
    params, state, loss = lbfgs_step(params, state)
    if it % 25 == 0:
        print(f"lbfgs {it:3d} loss {float(loss):.4e} rel. error {rel_error(params):.3e}")

print("FINAL", rel_error(params))
