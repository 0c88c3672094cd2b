"""1-D toy of a radiance field: density and colour along rays, volume rendered."""
import jax
import jax.numpy as jnp
import optax
from jax import random

N_SAMPLES = 24
NEAR, FAR = 0.0, 2.0


def posenc(x, L=4):
    fs = 2.0 ** jnp.arange(L) * jnp.pi
    ang = x[..., None] * fs
    return jnp.concatenate([jnp.sin(ang), jnp.cos(ang)], -1).reshape(*x.shape[:-1], -1)


def init(key, din, width=48):
    a, b, c = random.split(key, 3)
    he = lambda k, m, n: random.normal(k, (m, n)) * jnp.sqrt(2.0 / m)
    return {"l1": he(a, din, width), "l2": he(b, width, width), "out": he(c, width, 4) * 0.3}


def field(params, pts):
    h = jax.nn.relu(posenc(pts) @ params["l1"])
    h = jax.nn.relu(h @ params["l2"])
    o = h @ params["out"]
    return jax.nn.softplus(o[..., 0]), jax.nn.sigmoid(o[..., 1:])


def composite(sigma, rgb, z):
    dists = jnp.concatenate([z[..., 1:] - z[..., :-1], jnp.full_like(z[..., :1], 1e10)], -1)
    alpha = 1.0 - jnp.exp(-sigma * dists)
    log_t = jnp.log(1.0 - alpha)
    cum = jnp.cumsum(log_t[..., :-1], axis=-1)
    trans = jnp.exp(jnp.concatenate([jnp.zeros_like(cum[..., :1]), cum], -1))
    weights = alpha * trans
    return jnp.sum(weights[..., None] * rgb, -2), weights.sum(-1)


def render(params, origins, dirs, key):
    bins = jnp.linspace(NEAR, FAR, N_SAMPLES + 1)
    u = random.uniform(key, (origins.shape[0], N_SAMPLES))
    z = bins[:-1] + u * (bins[1] - bins[0])
    pts = origins[:, None] + dirs[:, None] * z[..., None]
    sigma, rgb = field(params, pts)
    return composite(sigma, rgb, z)


def target_colour(o, d):
    hit = jnp.abs(o[:, 0] + d[:, 0]) < 0.5
    return jnp.where(hit[:, None], jnp.array([0.9, 0.3, 0.1]), jnp.array([0.1, 0.2, 0.6]))


def loss_fn(params, o, d, key):
    rgb, acc = render(params, o, d, key)
    mse = jnp.mean((rgb - target_colour(o, d)) ** 2)
    return mse, {"psnr": -10 * jnp.log10(mse), "acc": acc.mean()}


tx = optax.adam(2e-3)


@jax.jit
def update(params, opt_state, key):
    ko, kd, kr = random.split(key, 3)
    o = random.uniform(ko, (64, 2), minval=-1, maxval=1)
    d = random.normal(kd, (64, 2))
    d = d / jnp.linalg.norm(d, axis=-1, keepdims=True)
    (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, o, d, kr)
    updates, opt_state = tx.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss, aux


key = random.PRNGKey(0)
params = init(key, 16)
opt_state = tx.init(params)
for it in range(150):
    key, sub = random.split(key)
    params, opt_state, loss, aux = update(params, opt_state, sub)
    if it % 15 == 0 or it == 1:
        print(it, "mse %.5f" % loss, "psnr %.2f" % aux["psnr"], "acc %.3f" % aux["acc"])
