"""Segmentation U-Net with nearest up-sampling: PyTorch modules against plain JAX functions on lax.conv."""
import jax
import jax.numpy as jnp
import numpy as np
import stablenum_jax
import stablenum_torch
import torch
import torch.nn as nn
import torch.nn.functional as F

WIDTH, GROUPS, CLASSES, SIZE = 8, 2, 3, 8


def make_batch():
    rng = np.random.default_rng(33)
    images = rng.normal(size=(4, 1, SIZE, SIZE)).astype(np.float32)
    masks = np.digitize(images[:, 0] + np.roll(images[:, 0], 1, axis=1), [-0.7, 0.7])
    return images, masks


# ---------------------------------------------------------------- PyTorch


class ConvNorm(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, padding=1, padding_mode="circular")
        self.norm = nn.GroupNorm(GROUPS, cout)

    def forward(self, x):
        return F.mish(self.norm(self.conv(x)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = ConvNorm(1, WIDTH)
        self.down2 = ConvNorm(WIDTH, 2 * WIDTH)
        self.bottom = ConvNorm(2 * WIDTH, 2 * WIDTH)
        self.up2 = ConvNorm(4 * WIDTH, WIDTH)
        self.up1 = ConvNorm(2 * WIDTH, WIDTH)
        self.classify = nn.Conv2d(WIDTH, CLASSES, 1)
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")

    def forward(self, images):
        skip1 = self.down1(images)
        skip2 = self.down2(F.avg_pool2d(skip1, 2))
        x = self.bottom(F.max_pool2d(skip2, 2))
        x = self.up2(torch.cat([self.upsample(x), skip2], dim=1))
        x = self.up1(torch.cat([self.upsample(x), skip1], dim=1))
        return self.classify(x)


def left():
    torch.manual_seed(26)
    model = UNet()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    images, masks = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(images, masks):
        logits = model(images)
        pixel = F.cross_entropy(logits, masks)
        probs = logits.softmax(dim=1)
        truth = F.one_hot(masks, CLASSES).permute(0, 3, 1, 2).to(probs.dtype)
        overlap = (probs * truth).sum(dim=(2, 3))
        dice = 2 * overlap / (probs.sum(dim=(2, 3)) + truth.sum(dim=(2, 3)) + 1.0)
        return pixel + 1 - dice.mean()

    return stablenum_torch.program(loss_fn, images, masks, model=model)


# ---------------------------------------------------------------- JAX


def conv_norm(p, x):
    """x: (height, width, channels) of one image, wrapped around at the borders."""
    padded = jnp.pad(x, ((1, 1), (1, 1), (0, 0)), mode="wrap")
    dims = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(padded[None], p["w"], (1, 1), "VALID", dimension_numbers=dims)[0] + p["b"]
    grouped = y.reshape(-1, GROUPS, y.shape[-1] // GROUPS)
    mean = grouped.mean(axis=(0, 2), keepdims=True)
    var = (grouped**2).mean(axis=(0, 2), keepdims=True) - mean**2
    y = ((grouped - mean) * jax.lax.rsqrt(var + 1e-5)).reshape(y.shape) * p["scale"] + p["shift"]
    return y * jnp.tanh(jnp.logaddexp(y, 0.0))


def tiles(x):
    h, w, c = x.shape
    return x.reshape(h // 2, 2, w // 2, 2, c)


def upsample(x):
    return jnp.repeat(jnp.repeat(x, 2, axis=0), 2, axis=1)


def segment(params, image):
    skip1 = conv_norm(params["down1"], image[..., None])
    skip2 = conv_norm(params["down2"], tiles(skip1).mean(axis=(1, 3)))
    x = conv_norm(params["bottom"], tiles(skip2).max(axis=(1, 3)))
    x = conv_norm(params["up2"], jnp.concatenate([upsample(x), skip2], axis=-1))
    x = conv_norm(params["up1"], jnp.concatenate([upsample(x), skip1], axis=-1))
    return x @ params["classify"]["w"] + params["classify"]["b"]


def loss_of_one(params, image, mask):
    log_probs = jax.nn.log_softmax(segment(params, image), axis=-1)
    truth = jax.nn.one_hot(mask, CLASSES, dtype=log_probs.dtype)
    pixel = -jnp.mean(jnp.sum(truth * log_probs, axis=-1))
    probs = jnp.exp(log_probs)
    overlap = jnp.einsum("hwc,hwc->c", probs, truth)
    dice = overlap / (0.5 * (probs + truth).sum(axis=(0, 1)) + 0.5)
    return pixel + jnp.mean(1 - dice)


def loss_fn(params, images, masks):
    return jnp.mean(jax.vmap(loss_of_one, (None, 0, 0))(params, images[:, 0], masks))


def right():
    widths = {"down1": (1, 1), "down2": (1, 2), "bottom": (2, 2), "up2": (4, 1), "up1": (2, 1)}
    keys = iter(jax.random.split(jax.random.key(80), 32))
    params = {}
    for name, (a, b) in widths.items():
        cin, cout = (1 if name == "down1" else a * WIDTH), b * WIDTH
        w = 0.2 * jax.random.normal(next(keys), (3, 3, cin, cout))
        b, scale, shift = 0.1 * jax.random.normal(next(keys), (3, cout))
        params[name] = {"w": w, "b": b, "scale": 1.0 + scale, "shift": shift}
    w, b = jax.random.normal(next(keys), (WIDTH, CLASSES)), 0.1 * jax.random.normal(next(keys), (CLASSES,))
    params["classify"] = {"w": w, "b": b}
    images, masks = (jnp.asarray(a) for a in make_batch())
    return stablenum_jax.program(loss_fn, params, images, masks)
