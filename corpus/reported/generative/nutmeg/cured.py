"""Meta-learn the initial weights of a small regressor; the inner problem is solved with optimistix."""
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import optax
import optimistix as optx


def sample_task(key):
    k1, k2, k3, k4 = jr.split(key, 4)
    amp = jr.uniform(k1, minval=0.5, maxval=2.0)
    phase = jr.uniform(k2, minval=0.0, maxval=jnp.pi)
    f = lambda x: amp * jnp.sin(x - phase)
    xs, xq = jr.uniform(k3, (8, 1), minval=-4, maxval=4), jr.uniform(k4, (24, 1), minval=-4, maxval=4)
    return (xs, f(xs)), (xq, f(xq))


net0 = eqx.nn.MLP(1, 1, width_size=16, depth=2, activation=jnp.tanh, key=jr.PRNGKey(1))
params0, static = eqx.partition(net0, eqx.is_inexact_array)


def mse(params, data):
    x, y = data
    pred = jax.vmap(eqx.combine(params, static))(x)
    return jnp.mean((pred - y) ** 2)


inner_solver = optx.GradientDescent(learning_rate=0.05, rtol=1e-8, atol=1e-8)


def adapt(params, support):
    sol = optx.minimise(
        mse, inner_solver, params, args=support, max_steps=10, throw=False,
        tags=frozenset({lx.positive_semidefinite_tag}),
        adjoint=optx.RecursiveCheckpointAdjoint(),
    )
    return sol.value


def meta_loss(params, tasks):
    def one(support, query):
        return mse(adapt(params, support), query)
    return jnp.mean(jax.vmap(one)(*tasks))


tx = optax.adam(8e-3)


@jax.jit
def outer_step(params, opt_state, key):
    tasks = jax.vmap(sample_task)(jr.split(key, 24))
    loss, grads = jax.value_and_grad(meta_loss)(params, tasks)
    updates, opt_state = tx.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


params, opt_state = params0, tx.init(params0)
val_tasks = jax.vmap(sample_task)(jr.split(jr.PRNGKey(99), 128))
evaluate = jax.jit(meta_loss)
print("validation before", float(evaluate(params, val_tasks)))
key = jr.PRNGKey(0)
for step in range(150):
    key, k = jr.split(key)
    params, opt_state, loss = outer_step(params, opt_state, k)
    if step % 15 == 0:
        print(f"outer step {step} loss {float(loss):.4f}")
print("FINAL", float(evaluate(params, val_tasks)))
