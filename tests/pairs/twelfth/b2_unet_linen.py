"""Segmentation with a small U-Net and consistency under augmentation: NCHW modules in PyTorch, NHWC in flax.linen."""

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

WIDTH, CLASSES, SLOPE, IGNORE = 8, 5, 0.1, 255
DICE_SMOOTH, CONSISTENCY = 1.0, 2.0
SIGMA, CONTRAST, GRAY = 0.8, 1.4, (0.2989, 0.587, 0.114)
LR, ALPHA, EPS, MOMENTUM, DECAY = 0.01, 0.95, 1e-3, 0.9, 1e-3
STEPS, POWER = 200, 0.9


def make_batch():
    rng = np.random.default_rng(8)
    labels = rng.integers(0, CLASSES, size=(4, 4, 4)).repeat(4, 1).repeat(4, 2)
    colours = rng.normal(size=(CLASSES, 3))
    images = colours[labels].transpose(0, 3, 1, 2) + 0.3 * rng.normal(size=(4, 3, 16, 16))
    labels[:, :2] = IGNORE
    labels[1, :, 11:] = IGNORE
    return images.astype(np.float32), labels


# ---------------------------------------------------------------- PyTorch


def gaussian_blur(images):
    x = torch.arange(-1, 2, dtype=images.dtype)
    pdf = torch.exp(-0.5 * (x / SIGMA) ** 2)
    kernel = pdf / pdf.sum()
    kernel = torch.outer(kernel, kernel).expand(3, 1, 3, 3)
    return F.conv2d(F.pad(images, (1, 1, 1, 1), mode="reflect"), kernel, groups=3)


def adjust_contrast(images):
    gray = (images * images.new_tensor(GRAY).view(1, 3, 1, 1)).sum(1, keepdim=True)
    mean = gray.mean(dim=(1, 2, 3), keepdim=True)
    return CONTRAST * images + (1 - CONTRAST) * mean


def second_view(images):
    return adjust_contrast(gaussian_blur(images.flip(-1)))


class DoubleConv(nn.Sequential):
    def __init__(self, n_in, n_out):
        super().__init__(
            nn.Conv2d(n_in, n_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(n_out),
            nn.LeakyReLU(SLOPE),
            nn.Conv2d(n_out, n_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(n_out),
            nn.LeakyReLU(SLOPE),
        )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1)
        self.enc = DoubleConv(WIDTH, WIDTH)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.mid = DoubleConv(WIDTH, 2 * WIDTH)
        self.reduce = nn.Conv2d(2 * WIDTH, WIDTH, 1)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.dec = DoubleConv(2 * WIDTH, WIDTH)
        self.out = nn.ConvTranspose2d(WIDTH, CLASSES, 3, stride=2, padding=1, output_padding=1)

    def forward(self, x):
        skip = self.enc(self.stem(x))
        deep = self.reduce(self.mid(self.pool(skip)))
        merged = torch.cat([skip, self.up(deep)], dim=1)
        return self.out(self.dec(merged))


def dice_loss(probs, labels):
    valid = (labels != IGNORE).unsqueeze(1)
    onehot = F.one_hot(labels.masked_fill(labels == IGNORE, 0), CLASSES).permute(0, 3, 1, 2) * valid
    probs = probs * valid
    inter = (probs * onehot).sum(dim=(0, 2, 3))
    total = probs.sum(dim=(0, 2, 3)) + onehot.sum(dim=(0, 2, 3))
    return 1 - ((2 * inter + DICE_SMOOTH) / (total + DICE_SMOOTH)).mean()


def make_rmsprop(model):
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=LR, alpha=ALPHA, eps=EPS, momentum=MOMENTUM, weight_decay=DECAY
    )
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=STEPS, power=POWER)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


# ---------------------------------------------------------------- JAX


def blur(images):
    weights = jax.nn.softmax(-0.5 * (jnp.array([-1.0, 0.0, 1.0]) / SIGMA) ** 2)
    for axis in (1, 2):
        pads = [(1, 1) if a == axis else (0, 0) for a in range(4)]
        padded = jnp.pad(images, pads, mode="reflect")
        size = images.shape[axis]
        images = sum(weights[i] * jax.lax.slice_in_dim(padded, i, i + size, axis=axis) for i in range(3))
    return images


def contrast(images):
    gray = images @ jnp.array(GRAY)
    mean = gray.mean(axis=(1, 2))[:, None, None, None]
    return mean + CONTRAST * (images - mean)


class ConvBlock(fnn.Module):
    features: int

    @fnn.compact
    def __call__(self, x):
        for i in range(2):
            x = fnn.Conv(self.features, (3, 3), use_bias=False, name=f"conv{i}")(x)
            x = fnn.BatchNorm(use_running_average=False, momentum=0.9, name=f"bn{i}")(x)
            x = fnn.leaky_relu(x, negative_slope=SLOPE)
        return x


def upsample_corners(x, factor):
    """Bilinear upsampling with aligned corners."""
    for axis in (1, 2):
        size = x.shape[axis]
        position = jnp.arange(factor * size) * ((size - 1) / (factor * size - 1))
        low = jnp.clip(jnp.floor(position).astype(int), 0, size - 2)
        shape = [1, 1, 1, 1]
        shape[axis] = -1
        frac = (position - low).reshape(shape)
        x = (1 - frac) * jnp.take(x, low, axis=axis) + frac * jnp.take(x, low + 1, axis=axis)
    return x


class FlaxUNet(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        x = fnn.Conv(WIDTH, (3, 3), strides=2, padding=1, name="stem")(x)
        skip = ConvBlock(WIDTH, name="enc")(x)
        x = fnn.max_pool(skip, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        x = ConvBlock(2 * WIDTH, name="mid")(x)
        x = fnn.Conv(WIDTH, (1, 1), name="reduce")(x)
        x = upsample_corners(x, 2)
        x = jnp.concatenate([skip, x], axis=-1)
        x = ConvBlock(WIDTH, name="dec")(x)
        return fnn.ConvTranspose(
            CLASSES, (3, 3), strides=(2, 2), padding=((1, 2), (1, 2)), transpose_kernel=True, name="out"
        )(x)


def masked_cross_entropy(logits, labels, valid):
    safe = jnp.where(valid, labels, 0)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, safe)
    return jnp.sum(nll * valid) / jnp.sum(valid)


def masked_dice(probabilities, labels, valid):
    targets = jax.nn.one_hot(labels, CLASSES) * valid[..., None]
    probabilities = probabilities * valid[..., None]
    overlap = jnp.einsum("bhwk,bhwk->k", probabilities, targets)
    size = jnp.sum(probabilities + targets, axis=(0, 1, 2))
    return jnp.mean(1 - (2 * overlap + DICE_SMOOTH) / (size + DICE_SMOOTH))


def make_optimizer():
    schedule = optax.polynomial_schedule(LR, 0.0, power=POWER, transition_steps=STEPS)
    return optax.chain(
        optax.add_decayed_weights(DECAY),
        optax.rmsprop(schedule, decay=ALPHA, eps=EPS, eps_in_sqrt=False, momentum=MOMENTUM),
    )


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(1)
    model = UNet()
    images, labels = make_batch()

    def loss_fn(images, labels):
        logits = model(images)
        probs = logits.softmax(dim=1)
        flipped = model(second_view(images)).softmax(dim=1).flip(-1).detach()
        ce = F.cross_entropy(logits, labels, ignore_index=IGNORE)
        return ce + dice_loss(probs, labels) + CONSISTENCY * F.mse_loss(probs, flipped)

    return stablenum_torch.program(
        loss_fn, torch.from_numpy(images), torch.from_numpy(labels), model=model, optimizer=make_rmsprop(model)
    )


def right():
    images, labels = make_batch()
    images = jnp.asarray(images.transpose(0, 2, 3, 1))
    net = FlaxUNet()
    variables = net.init(jax.random.key(2), images)

    def predict(params, images):
        state = {"params": params, "batch_stats": variables["batch_stats"]}
        logits, _ = net.apply(state, images, mutable=["batch_stats"])
        return logits

    def loss_fn(params, images, labels):
        valid = labels != IGNORE
        logits = predict(params, images)
        probabilities = fnn.softmax(logits)
        mirrored = contrast(blur(images[:, :, ::-1]))
        mirrored = fnn.softmax(predict(params, mirrored))[:, :, ::-1]
        mirrored = jax.lax.stop_gradient(mirrored)
        loss = masked_cross_entropy(logits, labels, valid) + masked_dice(probabilities, labels, valid)
        return loss + CONSISTENCY * jnp.mean((probabilities - mirrored) ** 2)

    return stablenum_jax.program(
        loss_fn, variables["params"], images, jnp.asarray(labels), optimizer=make_optimizer()
    )
