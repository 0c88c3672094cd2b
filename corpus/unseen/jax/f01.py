"""Expected SARSA with Boltzmann exploration on a little windy grid (equinox + optax)."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

W, H = 7, 5
GOAL = (6, 2)
WIND = np.array([0, 0, 1, 1, 0, 1, 0])
MOVES = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]])
GAMMA = 0.95


class WindyGrid:
    def __init__(self, rng):
        self.rng = rng
        self.reset()

    def reset(self):
        self.pos = np.array([0, self.rng.integers(0, H)])
        self.t = 0
        return self.obs()

    def obs(self):
        o = np.zeros(W + H, dtype=np.float32)
        o[self.pos[0]] = 1.0
        o[W + self.pos[1]] = 1.0
        return o

    def step(self, a):
        wind = WIND[self.pos[0]] * (self.rng.random() < 0.5)
        self.pos = self.pos + MOVES[a] + np.array([0, wind])
        self.pos = np.clip(self.pos, 0, [W - 1, H - 1])
        self.t += 1
        done = tuple(self.pos) == GOAL
        return self.obs(), (1.0 if done else -0.05), done, self.t >= 40


class QNet(eqx.Module):
    body: eqx.nn.MLP

    def __init__(self, key):
        self.body = eqx.nn.MLP(W + H, 4, 48, 2, activation=jax.nn.tanh, key=key)

    def __call__(self, o):
        return self.body(o)


ITERS = 50
explore = optax.linear_schedule(init_value=1.0, end_value=0.0, transition_steps=30)


def boltzmann(q, tau):
    return jax.nn.softmax(q / tau, axis=-1)


@eqx.filter_jit
def act_probs(net, obs, tau):
    return boltzmann(net(obs), tau)


def td_loss(net, batch, tau):
    o, a, r, o2, d = batch
    q = jax.vmap(net)(o)
    qa = jnp.take_along_axis(q, a[:, None], axis=1)[:, 0]
    q2 = jax.lax.stop_gradient(jax.vmap(net)(o2))
    v2 = jnp.sum(boltzmann(q2, tau) * q2, axis=-1)
    target = r + GAMMA * (1.0 - d) * v2
    return optax.huber_loss(qa, target).mean()


opt = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(5e-3))


@eqx.filter_jit
def learn(net, opt_state, batch, tau):
    loss, grads = eqx.filter_value_and_grad(td_loss)(net, batch, tau)
    upd, opt_state = opt.update(grads, opt_state, net)
    return eqx.apply_updates(net, upd), opt_state, loss


rng = np.random.default_rng(3)
env = WindyGrid(rng)
net = QNet(jax.random.PRNGKey(3))
opt_state = opt.init(eqx.filter(net, eqx.is_array))
memory = []
obs = env.reset()
wins = 0

for it in range(ITERS):
    tau = explore(it)
    for _ in range(40):
        p = np.asarray(act_probs(net, obs, tau), dtype=np.float64)
        a = rng.choice(4, p=p / p.sum())
        nxt, r, done, cut = env.step(a)
        memory.append((obs, a, r, nxt, float(done)))
        wins += done
        obs = env.reset() if (done or cut) else nxt
    for _ in range(2):
        idx = rng.integers(0, len(memory), 64)
        cols = list(zip(*[memory[i] for i in idx]))
        batch = (jnp.array(np.stack(cols[0])), jnp.array(cols[1]), jnp.array(cols[2], jnp.float32),
                 jnp.array(np.stack(cols[3])), jnp.array(cols[4], jnp.float32))
        net, opt_state, loss = learn(net, opt_state, batch, tau)
    if it % 4 == 0:
        print(f"iter {it:3d} tau {float(tau):.3f} loss {float(loss):.4f} goals {wins}")
