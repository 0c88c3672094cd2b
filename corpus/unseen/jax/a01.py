"""Fit Lennard-Jones parameters (sigma, epsilon) to reference energies of small clusters."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

N_ATOMS = 8
N_CONF = 64


def make_cluster(rng):
    grid = np.array([[i, j, k] for i in range(2) for j in range(2) for k in range(2)], float)
    return 1.25 * grid + 0.08 * rng.standard_normal((N_ATOMS, 3))


def pair_distances(R):
    disp = R[:, None, :] - R[None, :, :]
    d2 = jnp.sum(disp ** 2, axis=-1)
    eye = jnp.eye(R.shape[0], dtype=bool)
    d2 = jnp.where(eye, 1.0, d2)
    return jnp.where(eye, 0.0, jnp.sqrt(d2))


def lennard_jones(dr, sigma, epsilon):
    idr = sigma / dr
    idr6 = idr ** 6
    idr12 = idr6 ** 2
    return jnp.nan_to_num(4.0 * epsilon * (idr12 - idr6))


def energy(params, R):
    dr = pair_distances(R)
    return 0.5 * jnp.sum(lennard_jones(dr, params["sigma"], params["epsilon"]))


def forces(params, R):
    return -jax.grad(energy, argnums=1)(params, R)


rng = np.random.default_rng(3)
conf = jnp.asarray(np.stack([make_cluster(rng) for _ in range(N_CONF)]), jnp.float32)
true = {"sigma": jnp.float32(1.07), "epsilon": jnp.float32(0.8)}
E_ref = jax.vmap(energy, in_axes=(None, 0))(true, conf)
print("reference energies", float(E_ref.min()), float(E_ref.max()))
f0 = forces(true, conf[0])
print("max |F| of first cluster", float(jnp.abs(f0).max()))


def loss_fn(params, R, E):
    pred = jax.vmap(energy, in_axes=(None, 0))(params, R)
    return jnp.mean((pred - E) ** 2)


params = {"sigma": jnp.float32(1.0), "epsilon": jnp.float32(1.0)}
tx = optax.chain(optax.clip(1.0), optax.adam(5e-3))
state = tx.init(params)


@jax.jit
def step(params, state, R, E):
    loss, g = jax.value_and_grad(loss_fn)(params, R, E)
    upd, state = tx.update(g, state, params)
    return optax.apply_updates(params, upd), state, loss


for it in range(200):
    idx = rng.integers(0, N_CONF, 16)
    params, state, loss = step(params, state, conf[idx], E_ref[idx])
    if it % 20 == 0:
        print(it, float(loss), float(params["sigma"]), float(params["epsilon"]))
print("final", params)
