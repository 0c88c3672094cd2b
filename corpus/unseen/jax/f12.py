"""Learn the drag of a ball from radio telemetry. Packets arrive with flipped bits, so some updates have to be thrown away."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

DT, STEPS = 0.05, 40
TRUE_CD, G = 0.12, 9.81


def simulate(drag, v0):
    def f(state, _):
        pos, vel = state
        acc = -drag(vel) * vel - jnp.array([0.0, G])
        vel = vel + DT * acc
        pos = pos + DT * vel
        return (pos, vel), pos
    _, path = jax.lax.scan(f, (jnp.zeros(2), v0), None, length=STEPS)
    return path


def true_drag(vel):
    return TRUE_CD * jnp.sqrt(jnp.sum(vel ** 2) + 1e-9)


def mlp_init(key):
    a, b = jax.random.split(key)
    return {"w1": jax.random.normal(a, (1, 16)) * 0.5, "b1": jnp.zeros(16),
            "w2": jax.random.normal(b, (16, 1)) * 0.2, "b2": jnp.zeros(1)}


def learned_drag(p):
    def drag(vel):
        s = jnp.sqrt(jnp.sum(vel ** 2) + 1e-9)[None] / 10.0
        h = jnp.tanh(s @ p["w1"] + p["b1"])
        return jax.nn.softplus(h @ p["w2"] + p["b2"])[0]
    return drag


class Radio:
    """float32 words over the air; now and then a packet gets its exponent bits damaged"""

    def __init__(self, seed, p_bad=0.15):
        self.rng = np.random.default_rng(seed)
        self.p_bad = p_bad

    def receive(self, paths):
        raw = np.array(paths, np.float32).view(np.uint32).copy()
        damaged = self.rng.random() < self.p_bad
        if damaged:
            k = self.rng.integers(0, raw.size, 6)
            flat = raw.reshape(-1)
            flat[k] = (flat[k] | 0x7F800000) if self.rng.random() < 0.7 else np.uint32(0x7F800000)
        return raw.view(np.float32), damaged


@jax.jit
def fly(v0):
    return jax.vmap(lambda v: simulate(true_drag, v))(v0)


def loss_fn(p, v0, track):
    pred = jax.vmap(lambda v: simulate(learned_drag(p), v))(v0)
    return jnp.mean(jnp.square(pred - track))


tx = optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(2.0), optax.adam(1e-2)), max_consecutive_errors=6)
params = mlp_init(jax.random.PRNGKey(0))
state = tx.init(params)


@jax.jit
def step(params, state, v0, track):
    loss, g = jax.value_and_grad(loss_fn)(params, v0, track)
    upd, state = tx.update(g, state, params)
    return optax.apply_updates(params, upd), state, loss


rng = np.random.default_rng(0)
radio = Radio(1)
losses, bad = [], 0
for it in range(250):
    angle = rng.uniform(0.3, 1.3, 16)
    speed = rng.uniform(4, 20, 16)
    v0 = jnp.asarray(np.stack([speed * np.cos(angle), speed * np.sin(angle)], 1), jnp.float32)
    track, damaged = radio.receive(fly(v0) + 0.02 * rng.normal(size=(16, STEPS, 2)))
    bad += damaged
    params, state, loss = step(params, state, v0, track)
    losses.append(float(loss))
    if it % 50 == 0 or not np.isfinite(loss) and it < 40:
        print(f"{it:3d} loss {float(loss):.4g}  skipped so far {int(state.total_notfinite)}  mean {np.mean(losses[-10:]):.4g}")

finite = np.array(losses)[np.isfinite(losses)]
print(f"damaged packets {bad}, skipped updates {int(state.total_notfinite)}, last good losses {np.round(finite[-5:], 4)}")
for s in (5.0, 10.0, 15.0):
    print(f"drag at {s} m/s: learned {float(learned_drag(params)(jnp.array([s, 0.0]))):.3f} true {TRUE_CD * s:.3f}")
assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(params))
