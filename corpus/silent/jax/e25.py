import jax
import jax.numpy as jnp
import numpy as np
import optax


def random_graph(rng, n=60, classes=3):
    label = rng.integers(0, classes, n)
    same = label[:, None] == label[None]
    adj = (rng.random((n, n)) < np.where(same, 0.25, 0.04)).astype(np.float32)
    adj = np.maximum(adj, adj.T)
    np.fill_diagonal(adj, 1.0)
    deg = adj.sum(1)
    norm = adj / np.sqrt(deg[:, None] * deg[None])
    feats = rng.standard_normal((n, 8)).astype(np.float32)
    feats[np.arange(n), label] += 1.5
    return norm.astype(np.float32), feats, label


class GCN:
    def __init__(self, sizes):
        self.sizes = sizes

    def init(self, key):
        keys = jax.random.split(key, len(self.sizes) - 1)
        return [
            {"w": jax.random.normal(k, (a, b)) * np.sqrt(2.0 / (a + b)), "b": jnp.zeros(b)}
            for k, a, b in zip(keys, self.sizes[:-1], self.sizes[1:])
        ]

    def apply(self, params, adj, h):
        for layer in params[:-1]:
            h = jax.nn.relu(adj @ (h @ layer["w"]) + layer["b"])
        return adj @ (h @ params[-1]["w"]) + params[-1]["b"]


net = GCN([8, 32, 32, 3])


def loss_fn(params, adj, feats, label):
    logits = net.apply(params, adj, feats)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()
    return loss, (logits.argmax(-1) == label).mean()


grad_fn = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))


def train(n_updates=200, graphs_per_update=4, lr=0.3):
    rng = np.random.default_rng(0)
    pool = [random_graph(rng) for _ in range(40)]
    params = net.init(jax.random.PRNGKey(2))
    tx = optax.sgd(lr)
    opt_state = tx.init(params)

    @jax.jit
    def apply(params, opt_state, total):
        mean_grads = jax.tree.map(lambda g: g / graphs_per_update, total)
        updates, opt_state = tx.update(mean_grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    total = jax.tree.map(jnp.zeros_like, params)
    for update in range(n_updates):
        losses, accs = [], []
        for g in rng.choice(len(pool), graphs_per_update, replace=False):
            (loss, acc), grads = grad_fn(params, *pool[g])
            total = jax.tree.map(jnp.add, total, grads)
            losses.append(float(loss))
            accs.append(float(acc))
        params, opt_state = apply(params, opt_state, total)
        if update % 20 == 0 or update == n_updates - 1:
            print(f"update {update:3d} loss {np.mean(losses):.4f} node acc {np.mean(accs):.3f}")


if __name__ == "__main__":
    train()
