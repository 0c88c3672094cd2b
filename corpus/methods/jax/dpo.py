"""DPO: a small language model is pretrained, then preferences move it away from a frozen copy."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

VOCAB, LENGTH = 12, 8


class LM(nn.Module):
    dim: int = 64

    @nn.compact
    def __call__(self, tokens):
        start = jnp.full_like(tokens[:, :1], VOCAB)
        h = nn.Embed(VOCAB + 1, self.dim)(jnp.concatenate([start, tokens[:, :-1]], 1))
        return nn.Dense(VOCAB)(nn.RNN(nn.GRUCell(self.dim))(h))


model = LM()


def sequences(key, n):
    """Each token is near the one before it."""
    a, b = jax.random.split(key)
    moves = jax.random.randint(b, (n, LENGTH - 1), -1, 2)
    first = jax.random.randint(a, (n, 1), 0, VOCAB)
    return jnp.concatenate([first, first + jnp.cumsum(moves, 1)], 1) % VOCAB


def log_prob(params, tokens):
    logp = jax.nn.log_softmax(model.apply(params, tokens))
    return jnp.take_along_axis(logp, tokens[..., None], -1)[..., 0].sum(-1)


def sample(params, key, n):
    tokens = jnp.zeros((n, LENGTH), int)
    for t in range(LENGTH):
        key, sub = jax.random.split(key)
        tokens = tokens.at[:, t].set(jax.random.categorical(sub, model.apply(params, tokens)[:, t]))
    return tokens


def score(tokens):
    return (tokens % 2 == 0).mean(1)


def likelihood(params, tokens):
    return -log_prob(params, tokens).mean() / LENGTH


def preference(params, reference, chosen, rejected, beta=0.2):
    base = log_prob(reference, chosen) - log_prob(reference, rejected)
    margin = beta * (log_prob(params, chosen) - log_prob(params, rejected) - base)
    return -jax.nn.log_sigmoid(margin).mean(), (margin > 0).mean()


def main(pretraining=300, steps=300):
    key = jax.random.key(0)
    params = model.init(key, sequences(key, 1))
    tx = optax.adam(3e-3)
    state = tx.init(params)

    @jax.jit
    def pretrain(params, state, x):
        loss, grads = jax.value_and_grad(likelihood)(params, x)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    for i in range(pretraining):
        key, sub = jax.random.split(key)
        params, state, loss = pretrain(params, state, sequences(sub, 128))
    key, a, b = jax.random.split(key, 3)
    print(f"pretrained, loss {float(loss):.3f}, score {float(score(sample(params, a, 500)).mean()):.3f}")

    reference = params
    one, two = sample(reference, b, 2048).reshape(2, 1024, LENGTH)
    better, differ = score(one) > score(two), score(one) != score(two)
    chosen = jnp.where(better[:, None], one, two)[differ]
    rejected = jnp.where(better[:, None], two, one)[differ]
    tx2 = optax.adam(2e-4)
    state = tx2.init(params)

    @jax.jit
    def prefer(params, state, w, l):
        (loss, right), grads = jax.value_and_grad(preference, has_aux=True)(params, reference, w, l)
        updates, state = tx2.update(grads, state)
        return optax.apply_updates(params, updates), state, loss, right

    for i in range(steps):
        key, sub = jax.random.split(key)
        pick = jax.random.randint(sub, (64,), 0, len(chosen))
        params, state, loss, right = prefer(params, state, chosen[pick], rejected[pick])
        if i % 50 == 0:
            print(f"{i:4d} loss {float(loss):.4f} right {float(right):.3f}")
    print(f"score {float(score(sample(params, key, 500)).mean()):.3f}")


if __name__ == "__main__":
    main()
