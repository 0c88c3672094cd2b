# Federated digits: 4 clients, FedAvgM on the server, flax linen MLP with batch norm
import numpy as np
import jax
import jax.numpy as jnp
import flax.linen as nn
import optax
from sklearn.datasets import load_digits

ROUNDS, CLIENTS, LOCAL_STEPS, BS = 16, 4, 3, 64


class BatchNorm1d(nn.Module):
    momentum: float = 0.9
    eps: float = 1e-5

    @nn.compact
    def __call__(self, x, train):
        width = x.shape[-1]
        mean = self.variable("batch_stats", "mean", jnp.zeros, (width,))
        var = self.variable("batch_stats", "var", jnp.ones, (width,))
        scale = self.param("scale", nn.initializers.ones, (width,))
        bias = self.param("bias", nn.initializers.zeros, (width,))
        if train:
            mu, v = x.mean(0), x.var(0)
            if not self.is_initializing():
                mean.value = self.momentum * mean.value + (1 - self.momentum) * mu
                var.value = self.momentum * var.value + (1 - self.momentum) * v
        else:
            mu, v = mean.value, var.value
        return (x - mu) / jnp.sqrt(v + self.eps) * scale + bias


class SmallNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.silu(BatchNorm1d()(nn.Dense(48, use_bias=False)(x), train))
        x = nn.silu(BatchNorm1d()(nn.Dense(24, use_bias=False)(x), train))
        return nn.Dense(10)(x)


net = SmallNet()
local_opt = optax.sgd(0.05)
server_opt = optax.sgd(0.6, momentum=0.9)


def client_loss(params, stats, x, y):
    out, new = net.apply({"params": params, "batch_stats": stats}, x, True,
                         mutable=["batch_stats"])
    ce = optax.softmax_cross_entropy_with_integer_labels(out, y).mean()
    return ce, new["batch_stats"]


@jax.jit
def local_step(variables, opt_state, x, y):
    (loss, stats), g = jax.value_and_grad(client_loss, has_aux=True)(
        variables["params"], variables["batch_stats"], x, y)
    upd, opt_state = local_opt.update(g, opt_state)
    params = optax.apply_updates(variables["params"], upd)
    return {"params": params, "batch_stats": stats}, opt_state, loss


@jax.jit
def server_step(global_vars, client_vars, opt_state):
    mean = jax.tree.map(lambda *a: sum(a) / len(a), *client_vars)
    pseudo_grad = jax.tree.map(lambda g, m: g - m, global_vars, mean)
    upd, opt_state = server_opt.update(pseudo_grad, opt_state)
    return optax.apply_updates(global_vars, upd), opt_state


@jax.jit
def evaluate(variables, x, y):
    out = net.apply(variables, x, False)
    ce = optax.softmax_cross_entropy_with_integer_labels(out, y).mean()
    return ce, (out.argmax(-1) == y).mean()


def split_clients(x, y, rng):
    order = rng.permutation(len(y))
    return [(x[i], y[i]) for i in np.array_split(order, CLIENTS)]


def main():
    d = load_digits()
    x = (d.data / 16.0).astype(np.float32)
    y = d.target.astype(np.int32)
    rng = np.random.default_rng(0)
    perm = rng.permutation(len(y))
    test, train = perm[:300], perm[300:]
    clients = split_clients(x[train], y[train], rng)

    global_vars = net.init(jax.random.PRNGKey(0), x[:2], True)
    opt_state = server_opt.init(global_vars)
    for rnd in range(ROUNDS):
        results, losses = [], []
        for cx, cy in clients:
            v, s = global_vars, local_opt.init(global_vars["params"])
            for _ in range(LOCAL_STEPS):
                b = rng.choice(len(cy), BS, replace=False)
                v, s, l = local_step(v, s, cx[b], cy[b])
            results.append(v)
            losses.append(float(l))
        global_vars, opt_state = server_step(global_vars, results, opt_state)
        val, acc = evaluate(global_vars, x[test], y[test])
        print(f"round {rnd:2d} client loss {np.mean(losses):.4f} "
              f"val loss {float(val):.4f} acc {float(acc):.3f}")
        assert np.isfinite(float(val)), "validation loss is not finite"


if __name__ == "__main__":
    main()
