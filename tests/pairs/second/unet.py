"""A small U-Net for segmentation: PyTorch (NCHW) and its flax linen port (NHWC)."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

CLASSES = 3
WIDTHS = (8, 12, 16)
GROUPS = 4
SLOPE = 0.1
DICE_SMOOTH = 1.0


def make_batch():
    rng = np.random.default_rng(21)
    images = rng.normal(size=(2, 16, 16, 2)).astype(np.float32)
    labels = rng.integers(0, CLASSES, size=(2, 16, 16))
    return images, labels


# ---------------------------------------------------------------- PyTorch


class ConvUnit(torch.nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.conv = torch.nn.Conv2d(n_in, n_out, 3, padding=1)
        self.norm = torch.nn.GroupNorm(GROUPS, n_out)

    def forward(self, x):
        return F.leaky_relu(self.norm(self.conv(x)), SLOPE)


class Down(torch.nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.reduce = torch.nn.Conv2d(n_in, n_out, 3, stride=2, padding=1)
        self.unit = ConvUnit(n_out, n_out)

    def forward(self, x):
        x = self.reduce(x)
        return self.unit(x)


class Up(torch.nn.Module):
    def __init__(self, n_in, n_skip, n_out):
        super().__init__()
        self.unit = ConvUnit(n_in + n_skip, n_out)

    def forward(self, x, skip):
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return self.unit(torch.cat([x, skip], dim=1))


class TorchUNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        a, b, c = WIDTHS
        self.stem = ConvUnit(2, a)
        self.down1 = Down(a, b)
        self.down2 = Down(b, c)
        self.up1 = Up(c, b, b)
        self.up2 = Up(b, a, a)
        self.head = torch.nn.Conv2d(a, CLASSES, 1)

    def forward(self, x):
        full = self.stem(x)
        half = self.down1(full)
        quarter = self.down2(half)
        x = self.up1(quarter, half)
        x = self.up2(x, full)
        return self.head(x)


def dice_loss(logits, labels):
    probs = logits.softmax(dim=1)
    target = F.one_hot(labels, CLASSES).permute(0, 3, 1, 2).to(probs.dtype)
    overlap = (probs * target).sum(dim=(2, 3))
    total = probs.sum(dim=(2, 3)) + target.sum(dim=(2, 3))
    return (1 - (2 * overlap + DICE_SMOOTH) / (total + DICE_SMOOTH)).mean()


def left():
    torch.manual_seed(3)
    model = TorchUNet()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    images, labels = make_batch()
    images = torch.as_tensor(images).permute(0, 3, 1, 2).contiguous()

    def loss_fn(images, labels):
        logits = model(images)
        return F.cross_entropy(logits, labels) + dice_loss(logits, labels)

    return stablenum_torch.program(loss_fn, images, torch.as_tensor(labels), model=model)


# ---------------------------------------------------------------- flax linen


class Unit(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.features, (3, 3), padding="SAME", name="conv")(x)
        x = nn.GroupNorm(num_groups=GROUPS, epsilon=1e-5, name="norm")(x)
        return nn.leaky_relu(x, negative_slope=SLOPE)


class Encoder(nn.Module):
    """Keeps the output of every resolution, the finest first."""

    widths: tuple

    @nn.compact
    def __call__(self, x):
        x = Unit(self.widths[0], name="stem")(x)
        levels = [x]
        for i, width in enumerate(self.widths[1:], start=1):
            x = nn.Conv(width, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)), name=f"reduce{i}")(x)
            x = Unit(width, name=f"unit{i}")(x)
            levels.append(x)
        return levels


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, levels):
        *skips, x = levels
        for i, skip in enumerate(reversed(skips), start=1):
            x = jax.image.resize(x, skip.shape[:3] + x.shape[3:], method="bilinear")
            x = jnp.concatenate([x, skip], axis=-1)
            x = Unit(skip.shape[-1], name=f"up{i}")(x)
        return x


class UNet(nn.Module):
    @nn.compact
    def __call__(self, images):
        levels = Encoder(WIDTHS, name="encoder")(images)
        x = Decoder(name="decoder")(levels)
        return nn.Dense(CLASSES, name="head")(x)


def soft_dice(logits, labels):
    probabilities = nn.softmax(logits, axis=-1)
    onehot = jax.nn.one_hot(labels, CLASSES, dtype=logits.dtype)
    overlap = jnp.einsum("bhwc,bhwc->bc", probabilities, onehot)
    total = jnp.einsum("bhwc->bc", probabilities + onehot)
    score = (2.0 * overlap + DICE_SMOOTH) / (total + DICE_SMOOTH)
    return 1.0 - jnp.mean(score)


def right():
    images, labels = (jnp.asarray(part) for part in make_batch())
    net = UNet()
    params = net.init(jax.random.key(4), images)["params"]
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(5), len(leaves))
    params = tree.unflatten([p + 0.1 * jax.random.normal(k, p.shape, p.dtype) for p, k in zip(leaves, keys)])

    def loss_fn(params, images, labels):
        logits = net.apply({"params": params}, images)
        pixelwise = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return soft_dice(logits, labels) + pixelwise.mean()

    return stablenum_jax.program(loss_fn, params, images, labels)
