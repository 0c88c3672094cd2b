import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

NUM_CLASSES, SIZE, BORDER = 3, 16, 255


def make_cells(n, seed, outline):
    """Nuclei and debris on a plate, hand-drawn label maps."""
    rng = np.random.default_rng(seed)
    imgs = rng.normal(0, 0.4, (n, SIZE, SIZE, 1))
    masks = np.zeros((n, SIZE, SIZE), np.int32)
    yy, xx = np.mgrid[0:SIZE, 0:SIZE]
    for i in range(n):
        for _ in range(2):
            cy, cx, r = rng.uniform(3, 13), rng.uniform(3, 13), rng.uniform(2.0, 3.5)
            d = np.hypot(yy - cy, xx - cx)
            c = rng.integers(1, NUM_CLASSES)
            masks[i][d < r] = c
            imgs[i, ..., 0] += (d < r) * (1.5 if c == 1 else -1.5)
            if rng.uniform() < outline:
                masks[i][np.abs(d - r) < 0.5] = BORDER
    return jnp.asarray(imgs, jnp.float32), jnp.asarray(masks)


class TinyUNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        a = nn.relu(nn.Conv(8, (3, 3))(x))
        b = nn.relu(nn.Conv(16, (3, 3), strides=(2, 2))(a))
        b = nn.relu(nn.Conv(16, (3, 3))(b))
        up = jnp.repeat(jnp.repeat(b, 2, axis=1), 2, axis=2)
        return nn.Conv(NUM_CLASSES, (1, 1))(nn.relu(nn.Conv(8, (3, 3))(jnp.concatenate([a, up], -1))))


model = TinyUNet()
x_train, m_train = make_cells(600, 0, outline=0.01)
x_val, m_val = make_cells(200, 1, outline=0.01)
params = model.init(jax.random.PRNGKey(0), x_train[:1])
tx = optax.adam(optax.cosine_decay_schedule(5e-3, 150))
opt_state = tx.init(params)


def segmentation_loss(params, x, m):
    logits = model.apply(params, x)
    valid = m != BORDER
    per_pixel = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(valid, m, 0))
    return (per_pixel * valid).sum() / valid.sum()


@jax.jit
def train_step(params, opt_state, x, m):
    loss, grads = jax.value_and_grad(segmentation_loss)(params, x, m)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


rng = np.random.default_rng(2)
for step in range(150):
    idx = rng.integers(0, 600, 8)
    params, opt_state, loss = train_step(params, opt_state, x_train[idx], m_train[idx])
    if step % 20 == 0:
        print("step", step, "loss", loss)

print("FINAL", float(segmentation_loss(params, x_val, m_val)))
