# Node classification on a brain-region style graph: the edge weights are the
# strongest pairwise correlations of the regions' time series.
import jax
import jax.numpy as jnp
import numpy as np
import optax
import flax.linen as nn

N, T, CLASSES = 60, 80, 3
rng = np.random.default_rng(5)
labels = rng.integers(0, CLASSES, N)
drivers = rng.normal(size=(CLASSES, T))
drivers[2] = -drivers[1] + 0.5 * rng.normal(size=T)
series = drivers[labels] + 1.5 * rng.normal(size=(N, T))

corr = np.corrcoef(series)
np.fill_diagonal(corr, 0.0)
threshold = np.quantile(np.abs(corr), 0.85)
adjacency = np.where(np.abs(corr) > threshold, corr, 0.0).astype(np.float32)


def normalise(adj):
    """D^-1/2 A D^-1/2; isolated nodes get zero weight."""
    degree = adj.sum(axis=1)
    inv_sqrt = degree ** -0.5
    inv_sqrt = jnp.where(jnp.isinf(inv_sqrt), 0.0, inv_sqrt)
    return inv_sqrt[:, None] * adj * inv_sqrt[None, :]


class GCN(nn.Module):
    hidden: int = 16

    @nn.compact
    def __call__(self, x, adj):
        a = normalise(adj)
        x = nn.relu(a @ nn.Dense(self.hidden)(x) + nn.Dense(self.hidden)(x))
        return a @ nn.Dense(CLASSES)(x) + nn.Dense(CLASSES)(x)


features = jnp.asarray(series[:, :20], jnp.float32)
adj = jnp.asarray(adjacency)
y = jnp.asarray(labels)
model = GCN()
variables = model.init(jax.random.PRNGKey(0), features, adj)


def loss_fn(v):
    logits = model.apply(v, features, adj)
    ce = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return ce.mean(), (logits.argmax(-1) == y).mean()


tx = optax.chain(optax.add_decayed_weights(1e-3), optax.adam(1e-2))
opt_state = tx.init(variables)
train = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
for epoch in range(60):
    (loss, acc), grads = train(variables)
    updates, opt_state = tx.update(grads, opt_state, variables)
    variables = optax.apply_updates(variables, updates)
    if epoch % 10 == 0:
        print(f"epoch {epoch}: loss={loss:.4f} acc={acc:.2f}")
