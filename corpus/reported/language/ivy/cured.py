import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

N_USERS, N_ITEMS, DIM, BATCH = 400, 500, 24, 128
rng = np.random.default_rng(0)

# interaction log: popularity follows a power law, taste decides the rest
popularity = 1.0 / np.arange(1, N_ITEMS + 1) ** 0.9
u_true = rng.normal(size=(N_USERS, 6))
i_true = rng.normal(size=(N_ITEMS, 6))
scores = np.log(popularity)[None] + 0.8 * u_true @ i_true.T
probs = np.exp(scores - scores.max(1, keepdims=True))
probs /= probs.sum(1, keepdims=True)
cdf = probs.cumsum(1)


def draw(n):
    users = rng.integers(0, N_USERS, n)
    items = (rng.random((n, 1)) > cdf[users]).sum(1).clip(0, N_ITEMS - 1)
    return users, items


train_u, train_i = draw(60000)
test_u, test_i = draw(4000)
item_freq = (np.bincount(train_i, minlength=N_ITEMS) + 1.0) / (len(train_i) + N_ITEMS)
log_q = jnp.asarray(np.log(item_freq), dtype=jnp.float32)


class Tower(eqx.Module):
    table: eqx.nn.Embedding
    mlp: eqx.nn.MLP
    bias: jax.Array

    def __init__(self, n, key):
        k1, k2 = jax.random.split(key)
        self.table = eqx.nn.Embedding(n, DIM, key=k1)
        self.mlp = eqx.nn.MLP(DIM, DIM, 48, 1, key=k2)
        self.bias = jnp.zeros((n,))

    def __call__(self, idx):
        e = self.table(idx)
        return e + self.mlp(e), self.bias[idx]


class TwoTower(eqx.Module):
    query: Tower
    candidate: Tower

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.query, self.candidate = Tower(N_USERS, k1), Tower(N_ITEMS, k2)

    def score(self, users, items):
        q, _ = jax.vmap(self.query)(users)
        c, b = jax.vmap(self.candidate)(items)
        return q @ c.T / jnp.sqrt(DIM) + b[None, :]


def retrieval_loss(model, users, items):
    logits = model.score(users, items)
    logits = logits - log_q[items][None, :]
    duplicate = (items[None, :] == items[:, None]) & ~jnp.eye(len(items), dtype=bool)
    logits = jnp.where(duplicate, -1e9, logits)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(items))).mean()


@eqx.filter_jit
def step(model, opt_state, users, items):
    loss, grads = eqx.filter_value_and_grad(retrieval_loss)(model, users, items)
    updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


@eqx.filter_jit
def evaluate(model, users, items):
    logits = model.score(users, jnp.arange(N_ITEMS))
    top = jax.lax.top_k(logits, 50)[1]
    return (top == items[:, None]).any(1).mean()


model = TwoTower(jax.random.PRNGKey(1))
optim = optax.adam(5e-3)
opt_state = optim.init(eqx.filter(model, eqx.is_array))
for it in range(400):
    idx = rng.integers(0, len(train_u), BATCH)
    model, opt_state, loss = step(model, opt_state, jnp.asarray(train_u[idx]), jnp.asarray(train_i[idx]))
    if it % 80 == 0:
        recall = float(evaluate(model, jnp.asarray(test_u), jnp.asarray(test_i)))
        print(f"iter {it} loss {float(loss):.4f} recall@50 {recall:.3f}")

print("FINAL", 1.0 - float(evaluate(model, jnp.asarray(test_u), jnp.asarray(test_i))))
