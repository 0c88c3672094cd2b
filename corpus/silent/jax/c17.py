"""Character GRU on a small periodic text; gradients are always clipped to norm 0.01 (plain SGD)."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

TEXT = ("the quick brown fox jumps over the lazy dog. "
        "pack my box with five dozen liquor jugs. ") * 20
chars = sorted(set(TEXT))
ids = np.array([chars.index(c) for c in TEXT])
T, B = 24, 32


class CharGRU(nn.Module):
    vocab: int

    @nn.compact
    def __call__(self, tok):
        x = nn.Embed(self.vocab, 32)(tok)
        x = nn.RNN(nn.GRUCell(64))(x)
        return nn.Dense(self.vocab)(x)


model = CharGRU(len(chars))
params = model.init(jax.random.key(0), jnp.zeros((1, T), int))
tx = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(optax.cosine_decay_schedule(20.0, 300), momentum=0.9, nesterov=True))
opt_state = tx.init(params)


@jax.jit
def step(params, opt_state, tok):
    def loss_fn(p):
        logits = model.apply(p, tok[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tok[:, 1:]).mean()

    loss, g = jax.value_and_grad(loss_fn)(params)
    gn = optax.global_norm(g)
    u, opt_state = tx.update(g, opt_state, params)
    return optax.apply_updates(params, u), opt_state, loss, gn


rng = np.random.default_rng(0)
for i in range(250):
    starts = rng.integers(0, len(ids) - T - 1, B)
    tok = np.stack([ids[s:s + T + 1] for s in starts])
    params, opt_state, loss, gn = step(params, opt_state, tok)
    if i % 25 == 0 or i == 249:
        print(f"{i:4d} loss {loss:.4f} grad norm {gn:.3f}")
