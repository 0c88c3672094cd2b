"""Bayesian logistic regression, sampled with the Metropolis-adjusted Langevin algorithm."""
import jax
import jax.numpy as jnp
import numpy as np

TRUE = jnp.array([1.5, -1.0, 0.5, 0.0, 0.8])


def data(key, n=300):
    a, b = jax.random.split(key)
    x = jax.random.normal(a, (n, len(TRUE)))
    return x, jax.random.bernoulli(b, jax.nn.sigmoid(x @ TRUE)).astype(jnp.float32)


def log_posterior(w, x, y):
    logits = x @ w
    fit = jnp.sum(y * jax.nn.log_sigmoid(logits) + (1 - y) * jax.nn.log_sigmoid(-logits))
    return fit - 0.5 * jnp.sum(w**2) / 4.0


def log_proposal(to, at, grad, step):
    return -jnp.sum((to - at - step * grad) ** 2, -1) / (4 * step)


def main(draws=2000, chains=8, warmup=700):
    key = jax.random.key(0)
    key, a, b = jax.random.split(key, 3)
    x, y = data(a)
    value_and_grad = jax.vmap(jax.value_and_grad(lambda w: log_posterior(w, x, y)))

    @jax.jit
    def transition(w, value, grad, step, key):
        ka, kb = jax.random.split(key)
        proposal = w + step * grad + jnp.sqrt(2 * step) * jax.random.normal(ka, w.shape)
        new_value, new_grad = value_and_grad(proposal)
        ratio = new_value - value + log_proposal(w, proposal, new_grad, step) - log_proposal(proposal, w, grad, step)
        accept = jnp.log(jax.random.uniform(kb, (chains,))) < ratio
        w = jnp.where(accept[:, None], proposal, w)
        value = jnp.where(accept, new_value, value)
        grad = jnp.where(accept[:, None], new_grad, grad)
        return w, value, grad, accept.mean()

    w, step = jax.random.normal(b, (chains, len(TRUE))), 1e-3
    value, grad = value_and_grad(w)
    kept, accepted = [], 0.0
    for i in range(draws):
        key, sub = jax.random.split(key)
        w, value, grad, rate = transition(w, value, grad, step, sub)
        if i < warmup:
            step = step * float(np.exp(0.05 * (float(rate) - 0.57)))
        else:
            kept.append(np.asarray(w))
            accepted += float(rate)
        if i % 250 == 0:
            print(f"{i:4d} log posterior {float(value.mean()):.2f} step {step:.2e}")
    samples = np.stack(kept)
    within, between = samples.var(0).mean(0), samples.mean(0).var(0)
    print(f"accepted {accepted / (draws - warmup):.2f} r-hat {np.sqrt((within + between) / within).max():.3f}")
    print("mean", np.round(samples.mean((0, 1)), 2), "true", np.asarray(TRUE))


if __name__ == "__main__":
    main()
