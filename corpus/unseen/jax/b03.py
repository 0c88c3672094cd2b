# Decoder from a latent code to the geometry of a triatomic molecule.
# Loss = RMSD^2 after optimal superposition, so orientation does not matter.
import jax
import jax.numpy as jnp
from jax import random

GEOMS = {
    "H2O": [[0.000, 0.000, 0.117], [0.000, 0.757, -0.471], [0.000, -0.757, -0.471]],
    "SO2": [[0.000, 0.000, 0.363], [0.000, 1.235, -0.363], [0.000, -1.235, -0.363]],
    "O3": [[0.000, 0.000, 0.446], [0.000, 1.086, -0.223], [0.000, -1.086, -0.223]],
    "H2S": [[0.000, 0.000, 0.103], [0.000, 0.974, -0.823], [0.000, -0.974, -0.823]],
    "CO2": [[0.000, 0.000, 0.000], [1.162, 0.000, 0.000], [-1.162, 0.000, 0.000]],
    "NO2": [[0.000, 0.000, 0.323], [0.000, 1.102, -0.141], [0.000, -1.102, -0.141]],
}
names = list(GEOMS)
targets = jnp.array([GEOMS[n] for n in names])
targets = targets - targets.mean(axis=1, keepdims=True)


def kabsch(P, Q):
    """Rotation bringing P (3 atoms x 3) onto Q."""
    H = P.T @ Q
    U, S, Vt = jnp.linalg.svd(H, full_matrices=False)
    d = jnp.sign(jnp.linalg.det(Vt.T @ U.T))
    D = jnp.diag(jnp.array([1.0, 1.0, d]))
    return Vt.T @ D @ U.T


def decode(theta, z):
    h = jnp.tanh(z @ theta["W0"] + theta["b0"])
    h = jnp.tanh(h @ theta["W1"] + theta["b1"])
    xyz = (h @ theta["W2"] + theta["b2"]).reshape(3, 3)
    return xyz - xyz.mean(axis=0)


def rmsd2(theta, z, Q):
    P = decode(theta, z)
    R = kabsch(P, Q)
    return jnp.mean(jnp.sum((P @ R.T - Q) ** 2, axis=-1))


def layer(key, m, n):
    return random.normal(key, (m, n)) / jnp.sqrt(m)


ks = random.split(random.PRNGKey(11), 4)
theta = dict(W0=layer(ks[0], 4, 32), b0=jnp.zeros(32), W1=layer(ks[1], 32, 32), b1=jnp.zeros(32),
             W2=layer(ks[2], 32, 9), b2=jnp.zeros(9))
codes = random.normal(ks[3], (len(names), 4))

vg = jax.jit(jax.value_and_grad(rmsd2))
lr = 0.01
count = 0
for sweep in range(30):
    total = 0.0
    for i, name in enumerate(names):
        val, g = vg(theta, codes[i], targets[i])
        theta = jax.tree.map(lambda t, d: t - lr * d, theta, g)
        total += float(val)
        if sweep == 0:
            print(f"  step {count} {name:4s} rmsd2 {float(val):.4f}")
        count += 1
    if sweep % 5 == 0:
        print(f"sweep {sweep}: mean rmsd2 {total / len(names):.4f}")
