import jax
import jax.numpy as jnp
import optax
from jax import lax, random

SIZE, HORIZON, ENVS = 9, 8, 128
MOVES = jnp.array([[0, 1], [0, -1], [1, 0], [-1, 0]])
GOAL = jnp.array([SIZE - 1, SIZE - 1])


def legal(pos):
    nxt = pos[..., None, :] + MOVES
    return jnp.all((nxt >= 0) & (nxt < SIZE), axis=-1)


def features(pos):
    return jnp.concatenate([jax.nn.one_hot(pos[..., 0], SIZE), jax.nn.one_hot(pos[..., 1], SIZE)], -1)


def init(key):
    a, b, c = random.split(key, 3)
    return {
        "w1": random.normal(a, (2 * SIZE, 64)) * 0.3, "b1": jnp.zeros(64),
        "pi": random.normal(b, (64, 4)) * 0.01, "v": random.normal(c, (64, 1)) * 0.1,
    }


def apply(p, pos):
    h = jnp.tanh(features(pos) @ p["w1"] + p["b1"])
    logits = h @ p["pi"]
    mask = legal(pos)
    logits = jnp.where(mask, logits, -jnp.inf)
    return logits, (h @ p["v"])[..., 0]


def act(p, key, pos):
    logits, _ = apply(p, pos)
    a = random.categorical(key, logits)
    nxt = pos + MOVES[a]
    before, after = jnp.abs(pos - GOAL).sum(-1), jnp.abs(nxt - GOAL).sum(-1)
    return a, nxt, (before - after).astype(jnp.float32) + 2.0 * (after == 0)


def rollout(p, key, pos):
    def one(pos, k):
        a, nxt, r = act(p, k, pos)
        return nxt, (pos, a, r)
    last, (ps, acts, rs) = lax.scan(one, pos, random.split(key, HORIZON))
    back = lambda g, r: (r + 0.9 * g, r + 0.9 * g)
    _, ret = lax.scan(back, apply(p, last)[1], rs, reverse=True)
    return ps, acts, ret, rs.mean()


def loss_fn(p, ps, acts, ret):
    logits, values = apply(p, ps)
    logp = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logp, acts[..., None], -1)[..., 0]
    adv = lax.stop_gradient(ret - values)
    probs = jnp.exp(logp)
    entropy = -jnp.sum(probs * logp, axis=-1).mean()
    return -(chosen * adv).mean() + 0.5 * jnp.mean((values - ret) ** 2) - 0.01 * entropy


tx = optax.adam(5e-3)


@jax.jit
def update(p, opt, key):
    k1, k2 = random.split(key)
    start = random.randint(k2, (ENVS, 2), 3, 5)
    ps, acts, ret, rew = rollout(p, k1, start)
    loss, g = jax.value_and_grad(loss_fn)(p, ps, acts, lax.stop_gradient(ret))
    up, opt = tx.update(g, opt)
    return optax.apply_updates(p, up), opt, loss, rew


@jax.jit
def evaluate(p):
    pos = jnp.stack(jnp.meshgrid(jnp.arange(SIZE), jnp.arange(SIZE)), -1).reshape(-1, 2)

    def one(pos, _):
        logits, _ = apply(p, pos)
        nxt = pos + MOVES[logits.argmax(-1)]
        at_goal = jnp.all(pos == GOAL, -1)
        return jnp.where(at_goal[:, None], pos, nxt), None
    pos, _ = lax.scan(one, pos, None, length=2 * SIZE)
    return jnp.abs(pos - GOAL).sum(-1).astype(jnp.float32).mean() + 0.0 * p["pi"].sum()


params = init(random.PRNGKey(0))
opt, key = tx.init(params), random.PRNGKey(7)
print("before", float(evaluate(params)))
for it in range(300):
    key, k = random.split(key)
    params, opt, loss, rew = update(params, opt, k)
    if it % 30 == 0:
        print(f"update {it:3d} loss {float(loss):+.4f} reward {float(rew):+.4f}")
print("FINAL", float(evaluate(params)))
