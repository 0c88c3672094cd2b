"""Ordinal severity classifier: continuation-ratio (stick breaking) head with a hand written cumprod rule."""
import numpy as np
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_diabetes

N_CLASS = 6


@jax.custom_vjp
def survive(q):
    """running product along the last axis"""
    return jnp.cumprod(q, axis=-1)


def survive_fwd(q):
    out = jnp.cumprod(q, axis=-1)
    return out, (q, out)


def survive_bwd(res, g):
    q, out = res
    tail = jnp.flip(jnp.cumsum(jnp.flip(g * out, -1), -1), -1)
    return (tail / q,)


survive.defvjp(survive_fwd, survive_bwd)


def hard_sigmoid(z):
    return jnp.clip(0.2 * z + 0.5, 0.0, 1.0)


def init_params(key, sizes):
    layers = []
    for fan_in, fan_out in zip(sizes[:-1], sizes[1:]):
        key, k = jax.random.split(key)
        layers.append({"w": jax.random.normal(k, (fan_in, fan_out)) * np.sqrt(1.0 / fan_in),
                       "b": jnp.zeros(fan_out)})
    return layers


def class_probs(params, x):
    h = x
    for layer in params[:-1]:
        h = jnp.tanh(h @ layer["w"] + layer["b"])
    stop = hard_sigmoid(h @ params[-1]["w"] + params[-1]["b"])      # P(stop at k | reached k)
    reach = survive(1.0 - stop)
    reach = jnp.concatenate([jnp.ones_like(reach[:, :1]), reach], axis=1)
    stop = jnp.concatenate([stop, jnp.ones_like(stop[:, :1])], axis=1)
    return reach * stop


def ranked_probability_score(params, x, y):
    cdf = jnp.cumsum(class_probs(params, x), axis=1)
    target = (jnp.arange(N_CLASS) >= y[:, None]).astype(jnp.float32)
    return jnp.mean(jnp.sum((cdf - target) ** 2, axis=1))


def decay(params, rate):
    return rate * sum(jnp.sum(l["w"] ** 2) for l in params)


tx = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(optax.cosine_decay_schedule(-3e-2, 80)))


@jax.jit
def accumulate(params, grads, x, y):
    loss, g = jax.value_and_grad(lambda p: ranked_probability_score(p, x, y) + decay(p, 1e-5))(params)
    return loss, jax.tree.map(jnp.add, grads, g)


@jax.jit
def apply(params, opt_state, grads, n):
    grads = jax.tree.map(lambda g: g / n, grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, optax.global_norm(grads)


def main():
    x, t = load_diabetes(return_X_y=True)
    x = (x / x.std(0)).astype(np.float32)
    y = np.digitize(t, np.quantile(t, np.linspace(0, 1, N_CLASS + 1)[1:-1])).astype(np.int32)
    params = init_params(jax.random.PRNGKey(4), [10, 24, N_CLASS - 1])
    opt_state = tx.init(params)
    rng = np.random.default_rng(0)
    for step in range(60):
        grads = jax.tree.map(jnp.zeros_like, params)
        total = 0.0
        for micro in np.array_split(rng.permutation(len(y))[:220], 4):
            if len(micro) == 55:
                loss, grads = accumulate(params, grads, x[micro], y[micro])
                total += float(loss) / 4
        params, opt_state, gnorm = apply(params, opt_state, grads, 4.0)
        if step % 5 == 0:
            print(f"step {step:2d}  RPS {total:.4f}  grad norm {float(gnorm):.3f}")
        if not np.isfinite(total + float(gnorm)):
            raise ArithmeticError(f"step {step}: RPS {total}, grad norm {float(gnorm)}")
    print("done, RPS", total)


if __name__ == "__main__":
    main()
