"""Next-character model with a sparsemax output layer; some characters are not allowed after some others."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

TEXT = ("the rain it raineth on the just and also on the unjust fella but chiefly on the just "
        "because the unjust hath the just s umbrella and so it goes from day to day ") * 4
CHARS = sorted(set(TEXT))
IDX = {c: i for i, c in enumerate(CHARS)}
V, CTX = len(CHARS), 6


def bigram_table(ids):
    seen = np.zeros((V, V), bool)
    seen[ids[:-1], ids[1:]] = True
    return jnp.array(seen)


def sparsemax(z):
    zs = jnp.sort(z)[::-1]
    k = jnp.arange(1, z.shape[0] + 1)
    css = jnp.cumsum(zs)
    support = 1 + k * zs > css
    kz = support.sum()
    tau = (css[kz - 1] - 1) / kz
    return jnp.maximum(z - tau, 0.0)


@jax.custom_vjp
def sparsemax_loss(z, y):
    return _fwd(z, y)[0]


def _fwd(z, y):
    p = sparsemax(z)
    diff = p - jax.nn.one_hot(y, z.shape[0])
    omega = 0.5 * (1.0 - jnp.sum(p ** 2))
    return jnp.vdot(diff, z) + omega, (diff,)


def _bwd(res, g):
    (diff,) = res
    return g * diff, None


sparsemax_loss.defvjp(_fwd, _bwd)


class CharNet(nnx.Module):
    def __init__(self, rngs, dim=16, hidden=96):
        self.emb = nnx.Embed(V, dim, rngs=rngs)
        self.l1 = nnx.Linear(CTX * dim, hidden, rngs=rngs)
        self.l2 = nnx.Linear(hidden, V, rngs=rngs)

    def __call__(self, ctx):
        h = self.emb(ctx).reshape(ctx.shape[0], -1)
        return self.l2(nnx.gelu(self.l1(h)))


def constrain(logits, last, allowed):
    return jnp.where(allowed[last], logits, -jnp.inf)


ids = np.array([IDX[c] for c in TEXT])
allowed = bigram_table(ids)
windows = np.stack([ids[i:i + CTX + 1] for i in range(len(ids) - CTX)])
rng = np.random.default_rng(5)
model = CharNet(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, batch):
    ctx, nxt = batch[:, :-1], batch[:, -1]

    def loss_fn(m):
        z = constrain(m(ctx), ctx[:, -1], allowed)
        return jax.vmap(sparsemax_loss)(z, nxt).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def next_char_acc(model, batch):
    z = constrain(model(batch[:, :-1]), batch[:, -2], allowed)
    return (z.argmax(-1) == batch[:, -1]).mean()


best, patience = np.inf, 0
for step in range(50):
    batch = jnp.array(windows[rng.integers(0, len(windows), 64)])
    loss = float(train_step(model, optimizer, batch))
    if step % 10 == 0:
        print(f"step {step} loss {loss:.4f} acc {float(next_char_acc(model, jnp.array(windows[:300]))):.3f}")
    if not np.isfinite(loss):
        raise FloatingPointError(f"loss is {loss} at step {step}")
