"""A sequence model that reverses its input, evaluated with beam search between the epochs."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCAB, BOS, EOS, PAD, LENGTH = 13, 10, 11, 12, 5


class Seq2Seq(nn.Module):
    dim: int = 96

    def setup(self):
        self.embed = nn.Embed(VOCAB, self.dim)
        self.encoder, self.decoder = nn.RNN(nn.GRUCell(self.dim)), nn.RNN(nn.GRUCell(self.dim))
        self.out = nn.Dense(VOCAB)

    def __call__(self, src, tokens):
        known = src != PAD
        memory = self.encoder(self.embed(src) * known[..., None])
        h = self.decoder(self.embed(tokens), initial_carry=memory[:, -1])
        scores = jnp.where(known[:, None], h @ jnp.swapaxes(memory, 1, 2), -jnp.inf)
        context = jax.nn.softmax(scores) @ memory
        return self.out(jnp.concatenate([h, context], -1))


def batch(r, n):
    src, tgt = np.full((n, LENGTH), PAD), np.full((n, LENGTH + 1), PAD)
    for i, k in enumerate(r.integers(3, LENGTH + 1, n)):
        row = r.integers(0, 10, k)
        src[i, :k], tgt[i, :k], tgt[i, k] = row, row[::-1], EOS
    return src, tgt


model = Seq2Seq()


@jax.jit
def beam_search(params, src):
    src = jnp.broadcast_to(src, (4, LENGTH))  # four beams
    scores = jnp.full((4,), -jnp.inf).at[0].set(0.0)
    beams, done = jnp.full((4, LENGTH + 2), PAD).at[:, 0].set(BOS), jnp.zeros(4, bool)
    finished = jnp.full((VOCAB,), -jnp.inf).at[EOS].set(0.0)
    for t in range(LENGTH + 1):
        logp = jax.nn.log_softmax(model.apply(params, src, beams[:, :-1])[:, t])
        logp = logp.at[:, jnp.array([BOS, PAD])].set(-jnp.inf)
        logp = jnp.where(done[:, None], finished, logp)
        scores, index = jax.lax.top_k((scores[:, None] + logp).ravel(), 4)
        source, token = index // VOCAB, index % VOCAB
        beams = beams[source].at[:, t + 1].set(token)
        done = done[source] | (token == EOS)
    return beams[scores.argmax(), 1:]


def exact_match(params, r, n=40):
    src, tgt = batch(r, n)
    right = 0
    for s, t in zip(src, tgt):
        k = int(np.argmax(t == EOS)) + 1
        right += bool((np.asarray(beam_search(params, s))[:k] == t[:k]).all())
    return right / n


def main(epochs=6, steps=120):
    r, key = np.random.default_rng(0), jax.random.key(0)
    src, tgt = batch(r, 64)
    params = model.init(key, src, tgt)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
    state = tx.init(params)

    @jax.jit
    def step(params, state, src, tgt):
        def loss_fn(params):
            tokens = jnp.concatenate([jnp.full((len(tgt), 1), BOS), tgt[:, :-1]], 1)
            losses = optax.softmax_cross_entropy_with_integer_labels(model.apply(params, src, tokens), tgt)
            return jnp.sum(losses * (tgt != PAD)) / jnp.sum(tgt != PAD)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    for epoch in range(epochs):
        for _ in range(steps):
            params, state, loss = step(params, state, *batch(r, 64))
        print(f"epoch {epoch} loss {float(loss):.4f} exact match {exact_match(params, r):.2f}")


if __name__ == "__main__":
    main()
