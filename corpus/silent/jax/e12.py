import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

VOCAB, LENGTH, DIM, HEADS = 20, 12, 48, 4
TRAINABLE = ("Block", "head")


class EncoderBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(y, y)
        y = nn.LayerNorm()(x)
        y = nn.Dense(4 * DIM)(y)
        return x + nn.Dense(DIM)(nn.gelu(y))


class Tagger(nn.Module):
    depth: int = 2

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, DIM, name="embed_tok", embedding_init=nn.initializers.normal(1.0))(tokens)
        x = x + nn.Embed(LENGTH, DIM, name="embed_pos", embedding_init=nn.initializers.normal(1.0))(jnp.arange(LENGTH))
        for _ in range(self.depth):
            x = EncoderBlock()(x)
        return nn.Dense(VOCAB, name="head")(nn.LayerNorm(name="head_norm")(x))


def build_optimizer(params, lr):
    # the token and position tables stay as they came from the pretrained file
    flat = traverse_util.flatten_dict(params)
    groups = {path: "train" if path[0].startswith(TRAINABLE) else "frozen" for path in flat}
    labels = traverse_util.unflatten_dict(groups)
    return optax.multi_transform({"train": optax.adamw(lr, weight_decay=1e-4), "frozen": optax.set_to_zero()}, labels)


def sample(rng, n):
    tokens = rng.integers(0, VOCAB, (n, LENGTH))
    return tokens, tokens[:, ::-1].copy()


def run(steps=250, batch=64, lr=2e-3):
    rng = np.random.default_rng(0)
    model = Tagger()
    tokens, _ = sample(rng, 2)
    params = model.init(jax.random.key(0), tokens)["params"]
    tx = build_optimizer(params, optax.cosine_decay_schedule(lr, steps, alpha=0.1))
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, tokens, target):
        def loss_fn(p):
            logits = model.apply({"params": p}, tokens)
            ce = optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()
            return ce, (logits.argmax(-1) == target).mean()
        (loss, acc), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, acc

    for i in range(steps):
        params, opt_state, loss, acc = step(params, opt_state, *sample(rng, batch))
        if i % 50 == 0 or i == steps - 1:
            print(f"step {i} loss {float(loss):.4f} token acc {float(acc):.3f}")


if __name__ == "__main__":
    run()
