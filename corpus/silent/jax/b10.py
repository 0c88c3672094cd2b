"""REINFORCE on a contextual bandit: look at a digit, press one of ten buttons, reward 1 for the right one."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


class Policy:
    def __init__(self, key, hidden=64, lr=1e-2):
        k1, k2 = jax.random.split(key)
        self.params = {"l1": {"w": jax.random.normal(k1, (64, hidden)) * 0.15, "b": jnp.zeros(hidden)},
                       "l2": {"w": jax.random.normal(k2, (hidden, 10)) * 0.01, "b": jnp.zeros(10)}}
        self.opt = optax.adam(lr)
        self.opt_state = self.opt.init(self.params)
        self.baseline = 0.1
        self._learn = jax.jit(self._learn_impl)

    @staticmethod
    def logits(p, x):
        h = jax.nn.relu(x @ p["l1"]["w"] + p["l1"]["b"])
        return h @ p["l2"]["w"] + p["l2"]["b"]

    def act(self, x, key):
        return jax.random.categorical(key, self.logits(self.params, x))

    def _learn_impl(self, params, opt_state, x, action, advantage):
        def surrogate(p):
            logp = jax.nn.log_softmax(self.logits(p, x))
            chosen = jnp.take_along_axis(logp, action[:, None], 1)[:, 0]
            entropy = -(jnp.exp(logp) * logp).sum(1).mean()
            return -(chosen * advantage).mean() - 0.005 * entropy

        loss, g = jax.value_and_grad(surrogate)(params)
        upd, opt_state = self.opt.update(g, opt_state)
        return optax.apply_updates(params, upd), opt_state, loss

    def learn(self, x, action, reward):
        advantage = reward - self.baseline
        self.baseline = 0.9 * self.baseline + 0.1 * float(reward.mean())
        self.params, self.opt_state, loss = self._learn(self.params, self.opt_state, x, action, advantage)
        return float(loss)


X, Y = load_digits(return_X_y=True)
X = (X / 16.0).astype(np.float32)
rng = np.random.default_rng(4)
key = jax.random.key(4)
key, sub = jax.random.split(key)
policy = Policy(sub)
window = []
for episode in range(300):
    idx = rng.integers(0, 1500, 256)
    key, sub = jax.random.split(key)
    action = policy.act(X[idx], sub)
    reward = (np.asarray(action) == Y[idx]).astype(np.float32)
    loss = policy.learn(X[idx], action, reward)
    window.append(reward.mean())
    if episode % 30 == 29:
        print(f"episode {episode + 1:3d}  loss {loss:+.4f}  reward {np.mean(window[-30:]):.3f}")
greedy = np.asarray(policy.logits(policy.params, X[1500:])).argmax(1)
print("greedy accuracy on unseen digits", (greedy == Y[1500:]).mean())
