# Small colour-digit classifier with on-the-fly augmentation (equinox)
import numpy as np
import jax
import jax.numpy as jnp
import jax.random as jr
import equinox as eqx
import optax
from sklearn.datasets import load_digits


def load_colour_digits(seed=0):
    rng = np.random.default_rng(seed)
    raw = load_digits()
    grey = raw.images.astype(np.float32) / 16.0
    tint = rng.uniform(0.4, 1.0, size=(len(grey), 1, 1, 3))
    paper = rng.uniform(0.05, 0.25, size=(len(grey), 1, 1, 3))
    img = grey[..., None] * tint + paper * (1 - grey[..., None])
    return img.astype(np.float32), raw.target.astype(np.int32)


def rgb_to_hsv(rgb):
    r, g, b = rgb[..., 0], rgb[..., 1], rgb[..., 2]
    value = rgb.max(-1)
    span = value - rgb.min(-1)
    hue = jnp.where(value == r, (g - b) / span,
                    jnp.where(value == g, 2.0 + (b - r) / span, 4.0 + (r - g) / span))
    sat = span / value
    return jnp.stack([(hue / 6.0) % 1.0, sat, value], axis=-1)


def hsv_to_rgb(hsv):
    h, s, v = hsv[..., 0], hsv[..., 1], hsv[..., 2]
    n = jnp.array([5.0, 3.0, 1.0])
    k = (n + h[..., None] * 6.0) % 6.0
    ramp = jnp.clip(jnp.minimum(k, 4.0 - k), 0.0, 1.0)
    return v[..., None] * (1.0 - s[..., None] * ramp)


def random_grayscale(key, img, p):
    luma = img @ jnp.array([0.299, 0.587, 0.114])
    gray = jnp.repeat(luma[..., None], 3, axis=-1)
    return jnp.where(jr.bernoulli(key, p), gray, img)


def color_jitter(key, img, strength=0.15):
    kh, ks, kv = jr.split(key, 3)
    hsv = rgb_to_hsv(img)
    h = (hsv[..., 0] + jr.uniform(kh, minval=-strength, maxval=strength)) % 1.0
    s = hsv[..., 1] * jr.uniform(ks, minval=1 - strength, maxval=1 + strength)
    v = hsv[..., 2] * jr.uniform(kv, minval=1 - strength, maxval=1 + strength)
    return hsv_to_rgb(jnp.stack([h, jnp.clip(s, 0, 1), v], axis=-1))


@eqx.filter_jit
def augment(key, images, p_gray):
    def single(key, img):
        a, b = jr.split(key)
        return color_jitter(b, random_grayscale(a, img, p_gray))
    return jax.vmap(single)(jr.split(key, len(images)), images)


class Net(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(8 * 8 * 3, 10, 48, 2, key=key)

    def __call__(self, img):
        return self.mlp((img.reshape(-1) - 0.4) / 0.3)


@eqx.filter_jit
def step(model, opt_state, x, y):
    def loss_fn(m):
        return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(m)(x), y).mean()
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    updates, opt_state = tx.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, loss


x, y = load_colour_digits()
key = jr.PRNGKey(0)
model = Net(jr.PRNGKey(42))
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))
opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
gray_schedule = optax.linear_schedule(0.0, 0.2, 60, transition_begin=15)
rng = np.random.default_rng(1)

for it in range(60):
    idx = rng.choice(len(y), 16, replace=False)
    key, sub = jr.split(key)
    xb = augment(sub, x[idx], gray_schedule(it))
    model, opt_state, loss = step(model, opt_state, xb, y[idx])
    if it % 5 == 0:
        print(f"[{it:02d}] loss {loss:.4f}")
    if not jnp.isfinite(loss):
        raise SystemExit(f"training stopped at iteration {it}: loss={loss}")
