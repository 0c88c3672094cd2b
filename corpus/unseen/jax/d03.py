import jax
import jax.numpy as jnp
import numpy as np
import equinox as eqx
import optax
from jax.scipy.stats import norm
from jax.scipy.special import log_ndtr

# preference learning (Thurstone / probit): which of two flats do people like better?
def noise_level(step):
    return 0.5 * 0.9 ** step


@jax.custom_jvp
def log_phi(x):
    return log_ndtr(x)


@log_phi.defjvp
def log_phi_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    mills = norm.pdf(x) / norm.cdf(x)
    return log_phi(x), mills * dx


class Utility(eqx.Module):
    body: eqx.nn.MLP

    def __init__(self, d, key):
        self.body = eqx.nn.MLP(d, 1, 16, 2, activation=jax.nn.relu, key=key)

    def __call__(self, x):
        return self.body(x)[0]


def loss_fn(net, xi, xj, noise):
    """xi was preferred to xj"""
    u = jax.vmap(net)
    margin = (u(xi) - u(xj)) / (noise * jnp.sqrt(2.0))
    ridge = sum(jnp.sum(l.weight ** 2) for l in net.body.layers)
    return -jnp.mean(log_phi(margin)) + 1e-4 * ridge


@eqx.filter_jit
def make_step(net, opt_state, xi, xj, noise):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(net, xi, xj, noise)
    updates, opt_state = optim.update(grads, opt_state, eqx.filter(net, eqx.is_array))
    return eqx.apply_updates(net, updates), opt_state, loss


@eqx.filter_jit
def pair_accuracy(net, xi, xj):
    return jnp.mean(jax.vmap(net)(xi) > jax.vmap(net)(xj))


rng = np.random.RandomState(0)
rooms, income, crowd, age = (rng.lognormal(0.0, sd, 442) for sd in (0.4, 0.6, 1.1, 0.3))
y = 40 * np.log(income) + 25 * np.log(rooms) - 15 * np.log(crowd) + 5 * age
X = np.stack([rooms, income, crowd, age], 1).astype(np.float32)
X = (X - X.mean(0)) / X.std(0)


def make_pairs(idx, n):
    i, j = rng.choice(idx, n), rng.choice(idx, n)
    swap = y[i] + 6.0 * rng.randn(n) < y[j] + 6.0 * rng.randn(n)
    return X[np.where(swap, j, i)], X[np.where(swap, i, j)]


train_i, train_j = make_pairs(np.arange(350), 1500)
test_i, test_j = make_pairs(np.arange(350, 442), 300)

net = Utility(X.shape[1], jax.random.PRNGKey(1))
optim = optax.adam(5e-3)
opt_state = optim.init(eqx.filter(net, eqx.is_array))

step = 0
for epoch in range(4):
    order = rng.permutation(len(train_i))
    for chunk in order.reshape(15, 100):
        net, opt_state, loss = make_step(net, opt_state, train_i[chunk], train_j[chunk], jnp.float32(noise_level(step)))
        if step % 4 == 0:
            print(f"step {step:3d} loss {float(loss):8.4f}")
        step += 1
    print(f"  epoch {epoch}: test pair acc {float(pair_accuracy(net, test_i, test_j)):.3f}")
