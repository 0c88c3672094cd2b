# Differentiable cloth strip: find the throw velocities that bring the cloth to a target shape.
import jax
import jax.numpy as jnp
import optax

N, DT, STEPS = 12, 0.02, 40
REST, K_SPRING, DRAG, GRAVITY = 0.1, 900.0, 0.25, jnp.array([0.0, -9.8])

pos0 = jnp.stack([jnp.arange(N) * REST, jnp.zeros(N)], axis=1)
pinned = jnp.zeros(N).at[0].set(1.0)[:, None]


def drag_force(vel):
    speed = jnp.linalg.norm(vel, axis=-1, keepdims=True)
    return -DRAG * speed * vel


def spring_force(pos):
    d = pos[1:] - pos[:-1]
    length = jnp.sqrt(jnp.sum(d ** 2, axis=-1, keepdims=True) + 1e-9)
    f = K_SPRING * (length - REST) * d / length
    return jnp.zeros_like(pos).at[:-1].add(f).at[1:].add(-f)


def simulate(vel0, stiffness_scale):
    def step(carry, _):
        pos, vel = carry
        force = stiffness_scale * spring_force(pos) + drag_force(vel) + GRAVITY
        vel = (vel + DT * force) * (1 - pinned) * 0.995
        pos = pos + DT * vel
        return (pos, vel), pos
    (pos, _), path = jax.lax.scan(step, (pos0, vel0 * (1 - pinned)), None, length=STEPS)
    return pos, path


def init_net(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    return [(jax.random.normal(k, (m, n)) * jnp.sqrt(1 / m), jnp.zeros(n)) for k, m, n in zip(keys, sizes, sizes[1:])]


def net(params, goal):
    h = goal
    for w, b in params[:-1]:
        h = jnp.tanh(h @ w + b)
    w, b = params[-1]
    return 3.0 * (h @ w + b).reshape(N, 2)


def loss_fn(params, goals):
    def one(goal):
        vel0 = net(params, goal)
        final, _ = simulate(vel0, 1.0)
        return jnp.sum((final[-1] - goal) ** 2) + 1e-3 * jnp.mean(vel0 ** 2)
    return jnp.mean(jax.vmap(one)(goals))


def sample_goals(key, n):
    ang = jax.random.uniform(key, (n,), minval=-1.9, maxval=0.3)
    return 0.9 * jnp.stack([jnp.cos(ang), jnp.sin(ang)], axis=1)


params = init_net(jax.random.PRNGKey(0), [2, 32, 32, 2 * N])
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
opt_state = tx.init(params)


@jax.jit
def train_step(params, opt_state, goals):
    loss, grads = jax.value_and_grad(loss_fn)(params, goals)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


key = jax.random.PRNGKey(1)
for i in range(200):
    key, sub = jax.random.split(key)
    params, opt_state, loss = train_step(params, opt_state, sample_goals(sub, 16))
    if i % 20 == 0:
        print(f"iteration {i}: loss = {loss:.5f}")

print("FINAL", float(loss_fn(params, sample_goals(jax.random.PRNGKey(99), 64))))
