"""Two-view contrastive learning (InfoNCE) on nuisance-heavy synthetic observations."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

LATENT, OBS, FEAT = 4, 40, 16
rng = np.random.default_rng(0)
MIX = rng.normal(size=(LATENT + 12, OBS)).astype(np.float32) / 3.0


def views(n):
    s = rng.normal(size=(n, LATENT))
    make = lambda: np.concatenate([s, 1.5 * rng.normal(size=(n, 12))], 1).astype(np.float32) @ MIX
    return make(), make()


def glorot(key, m, n):
    return jax.random.normal(key, (m, n)) * np.sqrt(2.0 / (m + n))


def init_all(key):
    k = jax.random.split(key, 4)
    trunk = {"w1": glorot(k[0], OBS, 64), "b1": jnp.zeros(64), "w2": glorot(k[1], 64, FEAT), "b2": jnp.zeros(FEAT)}
    head = {"w1": glorot(k[2], FEAT, 16), "w2": glorot(k[3], 16, 8)}
    return {"trunk": trunk, "head": head}


def encode(trunk, x):
    h = jax.nn.relu(x @ trunk["w1"] + trunk["b1"])
    return h @ trunk["w2"] + trunk["b2"]


def project(head, f):
    z = jax.nn.relu(f @ head["w1"]) @ head["w2"]
    return z / (jnp.linalg.norm(z, axis=-1, keepdims=True) + 1e-6)


params = init_all(jax.random.PRNGKey(0))
trunk = params["trunk"]
tx = optax.adam(3e-3)
opt_state = tx.init(params)


def info_nce(p, a, b):
    za = project(p["head"], encode(trunk, a))
    zb = project(p["head"], encode(trunk, b))
    sim = za @ zb.T / 0.2
    lab = jnp.arange(sim.shape[0])
    ce = optax.softmax_cross_entropy_with_integer_labels
    return 0.5 * (ce(sim, lab).mean() + ce(sim.T, lab).mean())


@jax.jit
def step(p, s, a, b):
    loss, g = jax.value_and_grad(info_nce)(p, a, b)
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s, loss


for i in range(300):
    params, opt_state, loss = step(params, opt_state, *views(128))
    if i % 50 == 0 or i == 299:
        print(f"step {i}: InfoNCE {float(loss):.3f} (chance {np.log(128):.3f})")
