"""PINN for the screened Poisson equation on a disc, with residual based refinement of the points."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

RADIUS = 1.0


def init_mlp(key, sizes):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        key, k = jax.random.split(key)
        layers.append((jax.random.normal(k, (a, b)) * np.sqrt(1.0 / a), jnp.zeros(b)))
    return layers


def mlp(layers, h):
    for w, b in layers[:-1]:
        h = jnp.tanh(h @ w + b)
    w, b = layers[-1]
    return (h @ w + b)[0]


def u(layers, xy):
    # hard boundary condition: distance to the rim times the network
    dist = RADIUS - jnp.linalg.norm(xy)
    return dist * mlp(layers, xy)


def source(xy):
    return jnp.exp(-4.0 * jnp.sum((xy - jnp.array([0.3, 0.1])) ** 2))


def residual(layers, xy):
    hess = jax.hessian(u, argnums=1)(layers, xy)
    return jnp.trace(hess) - 2.0 * u(layers, xy) + source(xy)


batch_residual = jax.jit(jax.vmap(residual, in_axes=(None, 0)))


@jax.jit
def train_step(layers, opt_state, pts):
    def loss_fn(p):
        return jnp.mean(jax.vmap(residual, in_axes=(None, 0))(p, pts) ** 2)
    loss, g = jax.value_and_grad(loss_fn)(layers)
    updates, opt_state = tx.update(g, opt_state, layers)
    return optax.apply_updates(layers, updates), opt_state, loss


def sample_disc(rng, n):
    r = RADIUS * np.sqrt(rng.uniform(size=n))
    a = 2 * np.pi * rng.uniform(size=n)
    return np.stack([r * np.cos(a), r * np.sin(a)], 1).astype(np.float32)


def candidate_grid(n=21):
    lin = np.linspace(-RADIUS, RADIUS, n, dtype=np.float32)
    grid = np.stack(np.meshgrid(lin, lin), -1).reshape(-1, 2)
    return grid[np.linalg.norm(grid, axis=1) < RADIUS]


rng = np.random.RandomState(0)
layers = init_mlp(jax.random.PRNGKey(3), [2, 20, 20, 1])
tx = optax.adam(4e-3)
opt_state = tx.init(layers)
pts, grid = sample_disc(rng, 200), candidate_grid()

for step in range(60):
    if step in (20, 40):
        err = jnp.abs(batch_residual(layers, grid))
        _, worst = jax.lax.top_k(err, 20)
        pts = np.concatenate([pts[20:], grid[np.asarray(worst)]])
        print(f"  refined: {len(worst)} points replaced")
    layers, opt_state, loss = train_step(layers, opt_state, pts)
    if step % 5 == 0:
        print(f"step {step:2d} residual loss {float(loss):.6f}")
centre = float(u(layers, jnp.array([0.3, 0.1])))
print("u at the source:", round(centre, 4))
