"""A two-level U-Net for segmentation: PyTorch against equinox (one image at a time under vmap)."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

CLASSES, BASE, GROUPS, BATCH, SIZE = 3, 8, 4, 4, 16
SMOOTH, DICE_WEIGHT = 1.0, 0.7
LR, L2 = 2e-3, 1e-3


def make_batch():
    rng = np.random.default_rng(23)
    images = rng.normal(size=(BATCH, 1, SIZE, SIZE)).astype(np.float32)
    # blocks of 4x4 pixels of one class, not balanced between the images
    coarse = rng.choice(CLASSES, p=(0.6, 0.3, 0.1), size=(BATCH, SIZE // 4, SIZE // 4))
    masks = coarse.repeat(4, axis=1).repeat(4, axis=2)
    images += 0.5 * masks[:, None].astype(np.float32)
    return images, masks


# ---------------------------------------------------------------- PyTorch


class DoubleConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1),
            nn.GroupNorm(GROUPS, out_channels),
            nn.SiLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1),
            nn.GroupNorm(GROUPS, out_channels),
            nn.SiLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class Down(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.conv = DoubleConv(in_channels, out_channels)

    def forward(self, x):
        return self.conv(self.pool(x))


class Up(nn.Module):
    def __init__(self, in_channels, skip_channels, out_channels):
        super().__init__()
        self.conv = DoubleConv(in_channels + skip_channels, out_channels)

    def forward(self, x, skip):
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        x = torch.cat([skip, x], dim=1)
        return self.conv(x)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inc = DoubleConv(1, BASE)
        self.down1 = Down(BASE, 2 * BASE)
        self.down2 = Down(2 * BASE, 2 * BASE)
        self.up1 = Up(2 * BASE, 2 * BASE, BASE)
        self.up2 = Up(BASE, BASE, BASE)
        self.outc = nn.Conv2d(BASE, CLASSES, kernel_size=1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.up1(x3, x2)
        x = self.up2(x, x1)
        return self.outc(x)


class DiceLoss(nn.Module):
    def __init__(self, smooth=SMOOTH):
        super().__init__()
        self.smooth = smooth

    def forward(self, logits, target):
        probs = F.softmax(logits, dim=1)
        onehot = F.one_hot(target, CLASSES).permute(0, 3, 1, 2).to(probs.dtype)
        dims = (0, 2, 3)
        intersection = (probs * onehot).sum(dims)
        cardinality = (probs + onehot).sum(dims)
        dice = (2.0 * intersection + self.smooth) / (cardinality + self.smooth)
        return 1.0 - dice.mean()


def left():
    torch.manual_seed(0)
    model = UNet()
    dice = DiceLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, weight_decay=L2)
    images, masks = make_batch()

    def loss_fn(images, masks):
        logits = model(images)
        return F.cross_entropy(logits, masks) + DICE_WEIGHT * dice(logits, masks)

    return stablenum_torch.program(
        loss_fn, torch.tensor(images), torch.tensor(masks), model=model, optimizer=optimizer
    )


# ---------------------------------------------------------------- JAX, equinox


class ConvNormAct(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm

    def __init__(self, cin, cout, key):
        self.conv = eqx.nn.Conv2d(cin, cout, 3, padding=1, key=key)
        self.norm = eqx.nn.GroupNorm(GROUPS, cout)

    def __call__(self, x):
        x = self.norm(self.conv(x))
        return x * jax.nn.sigmoid(x)


class Stage(eqx.Module):
    first: ConvNormAct
    second: ConvNormAct

    def __init__(self, cin, cout, key):
        k1, k2 = jax.random.split(key)
        self.first = ConvNormAct(cin, cout, k1)
        self.second = ConvNormAct(cout, cout, k2)

    def __call__(self, x):
        return self.second(self.first(x))


def halve(x):
    c, h, w = x.shape
    return x.reshape(c, h // 2, 2, w // 2, 2).max(axis=(2, 4))


def double(x):
    c, h, w = x.shape
    return jax.image.resize(x, (c, 2 * h, 2 * w), method="bilinear")


class SegNet(eqx.Module):
    encoder: list
    decoder: list
    head: eqx.nn.Conv2d

    def __init__(self, key):
        keys = jax.random.split(key, 6)
        self.encoder = [
            Stage(1, BASE, keys[0]),
            Stage(BASE, 2 * BASE, keys[1]),
            Stage(2 * BASE, 2 * BASE, keys[2]),
        ]
        self.decoder = [
            Stage(4 * BASE, BASE, keys[3]),
            Stage(2 * BASE, BASE, keys[4]),
        ]
        self.head = eqx.nn.Conv2d(BASE, CLASSES, 1, key=keys[5])

    def __call__(self, image):
        skips = []
        x = image
        for level, stage in enumerate(self.encoder):
            if level:
                skips.append(x)
                x = halve(x)
            x = stage(x)
        for stage in self.decoder:
            x = stage(jnp.concatenate([skips.pop(), double(x)], axis=0))
        return self.head(x)


def segmentation_loss(logits, masks):
    lse = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    log_probs = logits - lse
    truth = jnp.moveaxis(jax.nn.one_hot(masks, CLASSES), -1, 1)
    ce = -jnp.mean(jnp.sum(truth * log_probs, axis=1))
    probs = jnp.exp(log_probs)
    overlap = jnp.einsum("bchw,bchw->c", probs, truth)
    total = jnp.einsum("bchw->c", probs) + jnp.einsum("bchw->c", truth)
    dice = (2.0 * overlap + SMOOTH) / (total + SMOOTH)
    return ce + DICE_WEIGHT * jnp.mean(1.0 - dice)


def right():
    model = SegNet(jax.random.key(3))
    images, masks = make_batch()

    def loss_fn(model, images, masks):
        logits = jax.vmap(model)(images)
        return segmentation_loss(logits, masks)

    optimizer = optax.chain(optax.add_decayed_weights(L2), optax.adam(LR))
    return stablenum_jax.program(loss_fn, model, images, masks, optimizer=optimizer)
