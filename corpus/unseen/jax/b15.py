# One-file PPO on a toy steering task; no RL library, just numpy for the env.
import jax, jax.numpy as jnp, numpy as np, optax

rng = np.random.default_rng(0)
GAMMA, LAM, CLIP, MB = 0.98, 0.95, 0.2, 16

def env_reset():
    return np.array([rng.uniform(-1, 1), 0.0], np.float32)

def env_step(s, a):
    x, v = s
    v = 0.9 * v + 0.1 * (a - 1)
    x = x + v
    done = abs(x) > 2.0
    return np.array([x, v], np.float32), float(-abs(x)), done

def init(key):
    k = jax.random.split(key, 4)
    n = lambda k, a, b: jax.random.normal(k, (a, b)) * a ** -0.5
    return {"pi": [n(k[0], 2, 32), n(k[1], 32, 3) * 0.1], "v": [n(k[2], 2, 32), n(k[3], 32, 1)]}

def policy(p, s):
    return jax.nn.log_softmax(jnp.tanh(s @ p["pi"][0]) @ p["pi"][1])

def value(p, s):
    return (jnp.tanh(s @ p["v"][0]) @ p["v"][1])[..., 0]

@jax.jit
def act(p, s, key):
    lp = policy(p, s)
    a = jax.random.categorical(key, lp)
    return a, lp[a], value(p, s)

def collect(p, key, episodes=8, horizon=80):
    S, A, LP, ADV, RET = [], [], [], [], []
    for _ in range(episodes):
        s = env_reset(); rs, vs = [], []
        for t in range(horizon):
            key, sub = jax.random.split(key)
            a, lp, v = act(p, s, sub)
            S.append(s); A.append(int(a)); LP.append(float(lp)); vs.append(float(v))
            s, r, done = env_step(s, int(a))
            rs.append(r)
            if done:
                break
        vs.append(0.0 if done else float(value(p, s)))
        g, out = 0.0, []
        for t in reversed(range(len(rs))):
            g = rs[t] + GAMMA * vs[t + 1] - vs[t] + GAMMA * LAM * g
            out.append(g)
        out = out[::-1]
        ADV += out
        RET += [o + v for o, v in zip(out, vs)]
    f = lambda x: np.asarray(x, np.float32)
    return f(S), np.asarray(A), f(LP), f(ADV), f(RET), key

def ppo_loss(p, s, a, lp_old, adv, ret):
    adv = (adv - adv.mean()) / adv.std()
    lp = policy(p, s)[jnp.arange(a.shape[0]), a]
    ratio = jnp.exp(lp - lp_old)
    pg = -jnp.minimum(ratio * adv, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * adv).mean()
    return pg + 0.5 * ((value(p, s) - ret) ** 2).mean()

tx = optax.adam(1e-3)

@jax.jit
def update(p, st, *batch):
    loss, g = jax.value_and_grad(ppo_loss)(p, *batch)
    u, st = tx.update(g, st)
    return optax.apply_updates(p, u), st, loss

key = jax.random.PRNGKey(0)
params = init(key)
st = tx.init(params)
updates = 0
for it in range(6):
    S, A, LP, ADV, RET, key = collect(params, key)
    for epoch in range(3):
        perm = rng.permutation(len(A))
        for lo in range(0, len(A), MB):
            i = perm[lo:lo + MB]
            params, st, loss = update(params, st, S[i], A[i], LP[i], ADV[i], RET[i])
            updates += 1
    print(f"iter {it} samples {len(A)} updates {updates} loss {float(loss):.4f} return {RET.mean():.3f}")
