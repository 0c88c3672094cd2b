import functools
import jax
import jax.numpy as jnp
import optax

NUM_ENVS, ROLLOUT, LIMIT = 32, 32, 25
GAMMA, LAM = 0.97, 0.9


def init_mlp(key, sizes, last_scale):
    ks = jax.random.split(key, len(sizes) - 1)
    out = []
    for i, (k, m, n) in enumerate(zip(ks, sizes[:-1], sizes[1:])):
        s = last_scale if i == len(sizes) - 2 else 1.0
        out.append({"w": s * jax.random.normal(k, (m, n)) / jnp.sqrt(m), "b": jnp.zeros(n)})
    return out


def mlp(p, x):
    for layer in p[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ p[-1]["w"] + p[-1]["b"]


def reset_state(key):
    return {"s": jax.random.uniform(key, (2,), minval=-1, maxval=1), "t": jnp.zeros((), jnp.int32)}


def env_step(key, state, a):
    pos, vel = state["s"]
    vel = 0.9 * vel + 0.3 * jnp.tanh(a[0]) + 0.1 * pos
    pos = pos + 0.3 * vel
    t = state["t"] + 1
    reward = 1.0 - jnp.minimum(pos ** 2, 1.0)
    terminated, truncated = jnp.abs(pos) > 3.0, t >= LIMIT
    nxt = {"s": jnp.stack([pos, vel]), "t": t}
    fresh = reset_state(key)
    done = terminated | truncated
    return nxt, jax.tree.map(lambda f, n: jnp.where(done, f, n), fresh, nxt), reward, terminated, truncated


def policy_logp(p, s, a):
    std = jnp.exp(p["log_std"])
    return jnp.sum(-0.5 * ((a - mlp(p["actor"], s)) / std) ** 2 - p["log_std"], -1)


value = lambda p, s: mlp(p["critic"], s)[..., 0]


def rollout(p, states, key):
    def one(carry, k):
        states = carry
        k1, k2 = jax.random.split(k)
        obs = states["s"]
        act = mlp(p["actor"], obs) + jnp.exp(p["log_std"]) * jax.random.normal(k1, (NUM_ENVS, 1))
        nxt, carried, r, term, trunc = jax.vmap(env_step)(jax.random.split(k2, NUM_ENVS), states, act)
        done = term | trunc
        tr = dict(obs=obs, act=act, rew=r, logp=policy_logp(p, obs, act), val=value(p, obs),
                  next_val=value(p, nxt["s"]), terminated=term.astype(jnp.float32), dones=done.astype(jnp.float32))
        return carried, tr
    return jax.lax.scan(one, states, jax.random.split(key, ROLLOUT))


def compute_gae(tr):
    def back(gae, x):
        delta = x["rew"] + GAMMA * x["next_val"] * (1 - x["terminated"]) - x["val"]
        gae = delta + GAMMA * LAM * (1 - x["dones"]) * gae
        return gae, gae
    _, adv = jax.lax.scan(back, jnp.zeros(NUM_ENVS), tr, reverse=True)
    return adv, adv + tr["val"]


def loss_fn(p, b):
    ratio = jnp.exp(policy_logp(p, b["obs"], b["act"]) - b["logp"])
    adv = (b["adv"] - b["adv"].mean()) / (b["adv"].std() + 1e-8)
    pg = -jnp.minimum(ratio * adv, jnp.clip(ratio, 0.8, 1.2) * adv).mean()
    vf = jnp.mean((value(p, b["obs"]) - b["ret"]) ** 2)
    return pg + 0.5 * vf, vf


tx = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(2e-3))


@jax.jit
def iteration(p, opt, states, key):
    states, tr = rollout(p, states, key)
    adv, ret = compute_gae(tr)
    b = {k: tr[k].reshape(-1, *tr[k].shape[2:]) for k in ("obs", "act", "logp")}
    b.update(adv=adv.reshape(-1), ret=ret.reshape(-1))
    for _ in range(4):
        (_, vf), g = jax.value_and_grad(loss_fn, has_aux=True)(p, b)
        up, opt = tx.update(g, opt, p)
        p = optax.apply_updates(p, up)
    return p, opt, states, vf, tr["rew"].mean()


key = jax.random.PRNGKey(0)
ka, kc, kr, key = jax.random.split(key, 4)
p = {"actor": init_mlp(ka, (2, 32, 1), 0.1), "critic": init_mlp(kc, (2, 64, 64, 1), 1.0), "log_std": jnp.full((1,), -1.0)}
opt, states = tx.init(p), jax.vmap(reset_state)(jax.random.split(kr, NUM_ENVS))
for it in range(60):
    key, k = jax.random.split(key)
    p, opt, states, vf, rew = iteration(p, opt, states, k)
    if it % 6 == 0:
        print(f"iter {it:3d} value loss {float(vf):.4f} mean reward {float(rew):.4f}")

s, ret = jax.random.uniform(jax.random.PRNGKey(5), (256, 2), minval=-1, maxval=1), 0.0
start, cur = s, {"s": s, "t": jnp.zeros(256, jnp.int32)}
for t in range(150):
    act = mlp(p["actor"], cur["s"]) + jnp.exp(p["log_std"]) * jax.random.normal(jax.random.PRNGKey(t), (256, 1))
    cur, _, r, _, _ = jax.vmap(functools.partial(env_step, jax.random.PRNGKey(0)))(cur, act)
    ret = ret + GAMMA ** t * r
print("FINAL", float(jnp.mean(jnp.abs(value(p, start) - ret)) / jnp.mean(ret)))
