import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

VOCAB, CTX, DIM = 40, 20, 48


class AdaptedLinear(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    a: jax.Array
    b: jax.Array
    scale: float = eqx.field(static=True)

    def __init__(self, n_in, n_out, rank, key):
        k1, k2 = jr.split(key)
        self.weight = jr.normal(k1, (n_out, n_in)) / jnp.sqrt(n_in)
        self.bias = jnp.zeros(n_out)
        self.a = jr.normal(k2, (rank, n_in)) / jnp.sqrt(n_in)
        self.b = jnp.zeros((n_out, rank))
        self.scale = 16 / rank

    def __call__(self, x):
        return self.weight @ x + self.bias + self.scale * (self.b @ (self.a @ x))


class Block(eqx.Module):
    q: AdaptedLinear
    k: AdaptedLinear
    v: AdaptedLinear
    o: AdaptedLinear
    up: AdaptedLinear
    down: AdaptedLinear
    n1: eqx.nn.LayerNorm
    n2: eqx.nn.LayerNorm

    def __init__(self, key):
        ks = jr.split(key, 6)
        self.q, self.k, self.v, self.o = [AdaptedLinear(DIM, DIM, 8, k) for k in ks[:4]]
        self.up, self.down = AdaptedLinear(DIM, 3 * DIM, 8, ks[4]), AdaptedLinear(3 * DIM, DIM, 8, ks[5])
        self.n1, self.n2 = eqx.nn.LayerNorm(DIM), eqx.nn.LayerNorm(DIM)

    def __call__(self, x):
        h = jax.vmap(self.n1)(x)
        q, k, v = jax.vmap(self.q)(h), jax.vmap(self.k)(h), jax.vmap(self.v)(h)
        s = jnp.where(jnp.tril(jnp.ones((len(x), len(x)), bool)), q @ k.T / jnp.sqrt(DIM), -1e9)
        x = x + jax.vmap(self.o)(jax.nn.softmax(s, -1) @ v)
        h = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.n2)(x)))
        return x + jax.vmap(self.down)(h)


class LM(eqx.Module):
    tok: jax.Array
    pos: jax.Array
    blocks: list
    norm: eqx.nn.LayerNorm
    head: AdaptedLinear

    def __init__(self, key):
        k = jr.split(key, 5)
        self.tok, self.pos = jr.normal(k[0], (VOCAB, DIM)), 0.1 * jr.normal(k[1], (CTX, DIM))
        self.blocks = [Block(k[2])]
        self.norm, self.head = eqx.nn.LayerNorm(DIM), AdaptedLinear(DIM, VOCAB, 8, k[4])

    def __call__(self, ids):
        x = self.tok[ids] + self.pos[: len(ids)]
        for b in self.blocks:
            x = b(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


rng = np.random.default_rng(0)


def text(n, table):
    seq = rng.integers(0, VOCAB, (n, 1))
    for _ in range(CTX - 1):
        nxt = np.where(rng.random(n) < 0.9, table[seq[:, -1]], rng.integers(0, VOCAB, n))
        seq = np.concatenate([seq, nxt[:, None]], 1)
    return jnp.asarray(seq)


def loss_fn(train_part, rest, seq):
    logits = jax.vmap(eqx.combine(train_part, rest))(seq[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, seq[:, 1:]).mean()


def is_adapter(path, leaf):
    return eqx.is_array(leaf) and str(path[-1]) in (".a", ".b")


def fit(model, spec, table, steps, lr):
    train_part, rest = eqx.partition(model, spec)
    opt = optax.adam(lr)
    state = opt.init(train_part)

    @eqx.filter_jit
    def step(tp, st, seq):
        loss, g = eqx.filter_value_and_grad(loss_fn)(tp, rest, seq)
        u, st = opt.update(g, st)
        return eqx.apply_updates(tp, u), st, loss

    for i in range(steps):
        train_part, state, loss = step(train_part, state, text(32, table))
        if i % 20 == 0:
            print(f"  step {i} loss {float(loss):.4f}")
    return eqx.combine(train_part, rest)


model = LM(jr.PRNGKey(1))
adapters = jax.tree_util.tree_map_with_path(is_adapter, model)
base = jax.tree_util.tree_map(lambda leaf, ad: eqx.is_array(leaf) and not ad, model, adapters)
table_a, table_b = rng.permutation(VOCAB), rng.permutation(VOCAB)
print("pretraining")
model = fit(model, base, table_a, 80, 4e-3)
print("adapters only")
model = fit(model, adapters, table_b, 120, 4e-3)
train_part, rest = eqx.partition(model, adapters)
print("FINAL", float(loss_fn(train_part, rest, text(200, table_b))))
