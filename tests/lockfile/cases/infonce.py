"""Two-tower contrastive model in plain jax: symmetric InfoNCE with same-group pairs masked."""
import jax
import jax.numpy as jnp
import numpy as np

import stablenum_jax

TEXT, IMAGE, HIDDEN, EMBED = 28, 36, 48, 16
TEMPERATURE = 0.1


def dense(rng, n_in, n_out):
    w = rng.normal(0.0, n_in**-0.5, size=(n_in, n_out))
    return {"w": jnp.asarray(w, jnp.float32), "b": jnp.zeros(n_out, jnp.float32)}


def init_tower(rng, n_in):
    return {
        "inp": dense(rng, n_in, HIDDEN),
        "norm": {"scale": jnp.ones(HIDDEN), "shift": jnp.zeros(HIDDEN)},
        "out": dense(rng, HIDDEN, EMBED),
    }


def apply_dense(p, x):
    return x @ p["w"] + p["b"]


def layer_norm(p, x, eps=1e-5):
    mean = x.mean(axis=-1, keepdims=True)
    centred = x - mean
    var = jnp.mean(centred**2, axis=-1, keepdims=True)
    return centred / jnp.sqrt(var + eps) * p["scale"] + p["shift"]


def tower(p, x):
    h = apply_dense(p["inp"], x)
    h = jax.nn.relu(layer_norm(p["norm"], h))
    return apply_dense(p["out"], h)


def l2_normalize(x):
    norm = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    return x / jnp.maximum(norm, 1e-6)


def one_direction(logits, axis):
    """Cross-entropy with the diagonal as the right answer."""
    log_probs = jax.nn.log_softmax(logits, axis=axis)
    return -jnp.mean(jnp.diagonal(log_probs))


def info_nce(text, image, groups):
    text, image = l2_normalize(text), l2_normalize(image)
    similarity = text @ image.T
    logits = similarity / TEMPERATURE
    same_group = groups[:, None] == groups[None, :]
    false_negative = same_group & ~jnp.eye(len(groups), dtype=bool)
    logits = jnp.where(false_negative, -jnp.inf, logits)
    text_to_image = one_direction(logits, axis=1)
    image_to_text = one_direction(logits, axis=0)
    return 0.5 * (text_to_image + image_to_text)


def make_batch(n=20, seed=12):
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, 12, size=n)
    centre_text, centre_image = rng.normal(size=(12, TEXT)), rng.normal(size=(12, IMAGE))
    text = centre_text[groups] + 0.7 * rng.normal(size=(n, TEXT))
    image = centre_image[groups] + 0.7 * rng.normal(size=(n, IMAGE))
    return text.astype(np.float32), image.astype(np.float32), groups.astype(np.int32)


def program():
    rng = np.random.default_rng(12)
    params = {"text": init_tower(rng, TEXT), "image": init_tower(rng, IMAGE)}
    text, image, groups = make_batch()

    def loss_fn(params, text, image, groups):
        text_embed = tower(params["text"], text)
        image_embed = tower(params["image"], image)
        return info_nce(text_embed, image_embed, groups)

    return stablenum_jax.program(loss_fn, params, text, image, groups)
