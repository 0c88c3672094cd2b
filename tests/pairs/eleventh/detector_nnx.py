"""One-stage detector with a small feature pyramid, quality focal loss and GIoU loss: PyTorch and flax.nnx."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from flax import nnx
from torch import nn

import stablenum_jax
import stablenum_torch

IMAGE, CHANNELS, GROUPS, CLASSES, PER_CELL, BATCH = 16, 12, 4, 3, 2, 2
STRIDES, SIZES = (4, 8), (1.0, 1.5)
IGNORED, BACKGROUND = -1, CLASSES
BOX_WEIGHT, PRIOR = 2.0, -2.0
LR, ALPHA, MOMENTUM, EPS, DECAY = 2e-3, 0.9, 0.9, 1e-2, 1e-3


def make_anchors():
    """Centre and size (x, y, s) by level, row, column and anchor."""
    anchors = []
    for stride in STRIDES:
        ticks = (np.arange(IMAGE // stride) + 0.5) * stride
        for y in ticks:
            for x in ticks:
                anchors += [(x, y, stride * size) for size in SIZES]
    return np.array(anchors, dtype=np.float32)


def make_batch():
    rng = np.random.default_rng(77)
    anchors = make_anchors()
    images = rng.normal(size=(BATCH, 3, IMAGE, IMAGE))
    labels = rng.choice(
        [IGNORED, 0, 1, 2, BACKGROUND], p=[0.2, 0.1, 0.1, 0.1, 0.5], size=(BATCH, len(anchors))
    )
    shift = 0.2 * rng.normal(size=(BATCH, len(anchors), 2)) * anchors[:, 2:]
    half = anchors[:, 2:] * rng.uniform(0.6, 1.3, (BATCH, len(anchors), 2))
    centre = anchors[:, :2] + shift
    boxes = np.concatenate([centre - half, centre + half], axis=-1)
    return images.astype(np.float32), labels.astype(np.int32), boxes.astype(np.float32)


# ---------------------------------------------------------------- PyTorch


class ConvGN(nn.Sequential):
    def __init__(self, c_in, c_out, stride=1):
        super().__init__(
            nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(GROUPS, c_out),
            nn.ReLU(inplace=True),
        )


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = ConvGN(3, CHANNELS, stride=2)
        self.stage1 = ConvGN(CHANNELS, CHANNELS, stride=2)
        self.stage2 = ConvGN(CHANNELS, 2 * CHANNELS, stride=2)

    def forward(self, x):
        c3 = self.stage1(self.stem(x))
        return c3, self.stage2(c3)


class FPN(nn.Module):
    def __init__(self):
        super().__init__()
        self.lateral3 = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.lateral4 = nn.Conv2d(2 * CHANNELS, CHANNELS, 1)
        self.smooth = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, c3, c4):
        p4 = self.lateral4(c4)
        p3 = self.lateral3(c3) + F.interpolate(p4, scale_factor=2, mode="nearest")
        return self.smooth(p3), p4


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = ConvGN(CHANNELS, CHANNELS)
        self.cls_logits = nn.Conv2d(CHANNELS, PER_CELL * CLASSES, 3, padding=1)
        self.bbox_pred = nn.Conv2d(CHANNELS, PER_CELL * 4, 3, padding=1)
        nn.init.constant_(self.cls_logits.bias, PRIOR)

    @staticmethod
    def flatten(x, k):
        n, _, h, w = x.shape
        return x.view(n, PER_CELL, k, h, w).permute(0, 3, 4, 1, 2).reshape(n, -1, k)

    def forward(self, features):
        logits, deltas = [], []
        for x in features:
            x = self.tower(x)
            logits.append(self.flatten(self.cls_logits(x), CLASSES))
            deltas.append(self.flatten(self.bbox_pred(x), 4))
        return torch.cat(logits, dim=1), torch.cat(deltas, dim=1)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.fpn = FPN()
        self.head = Head()
        self.register_buffer("anchors", torch.from_numpy(make_anchors()))

    def forward(self, images):
        logits, deltas = self.head(self.fpn(*self.backbone(images)))
        l, t, r, b = (deltas.exp() * self.anchors[:, 2:]).unbind(-1)
        cx, cy, _ = self.anchors.unbind(-1)
        return logits, torch.stack([cx - l, cy - t, cx + r, cy + b], dim=-1)


def iou_and_giou(a, b):
    lt = torch.maximum(a[..., :2], b[..., :2])
    rb = torch.minimum(a[..., 2:], b[..., 2:])
    inter = (rb - lt).clamp(min=0).prod(-1)
    area_a = (a[..., 2:] - a[..., :2]).prod(-1)
    area_b = (b[..., 2:] - b[..., :2]).prod(-1)
    union = area_a + area_b - inter
    iou = inter / union
    hull = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])
    hull = hull.prod(-1)
    return iou, iou - (hull - union) / hull


def detection_loss(logits, boxes, labels, gt_boxes):
    positive = (labels >= 0) & (labels < BACKGROUND)
    valid = labels != IGNORED
    num_pos = positive.sum().clamp(min=1)
    iou, giou = iou_and_giou(boxes, gt_boxes)
    onehot = F.one_hot(labels.clamp(min=0), CLASSES + 1)[..., :CLASSES]
    quality = onehot * iou.detach().unsqueeze(-1)
    bce = F.binary_cross_entropy_with_logits(logits, quality, reduction="none")
    focal = (quality - logits.sigmoid()).abs().pow(2) * bce
    loss_cls = focal[valid].sum() / num_pos
    loss_box = (1 - giou)[positive].sum() / num_pos
    return loss_cls + BOX_WEIGHT * loss_box


# ---------------------------------------------------------------- JAX


class ConvNormAct(nnx.Module):
    def __init__(self, n_in, n_out, stride=1, *, rngs):
        pad = [(1, 1), (1, 1)]
        self.conv = nnx.Conv(
            n_in, n_out, (3, 3), strides=stride, padding=pad, use_bias=False, rngs=rngs
        )
        self.norm = nnx.GroupNorm(n_out, num_groups=GROUPS, epsilon=1e-5, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.norm(self.conv(x)))


class PyramidDetector(nnx.Module):
    def __init__(self, rngs):
        c = CHANNELS
        self.down1 = ConvNormAct(3, c, 2, rngs=rngs)
        self.down2 = ConvNormAct(c, c, 2, rngs=rngs)
        self.down3 = ConvNormAct(c, 2 * c, 2, rngs=rngs)
        self.side_fine = nnx.Linear(c, c, rngs=rngs)
        self.side_coarse = nnx.Linear(2 * c, c, rngs=rngs)
        self.smooth = nnx.Conv(c, c, (3, 3), rngs=rngs)
        self.tower = ConvNormAct(c, c, rngs=rngs)
        self.classify = nnx.Conv(c, PER_CELL * CLASSES, (3, 3), rngs=rngs)
        self.regress = nnx.Conv(c, PER_CELL * 4, (3, 3), rngs=rngs)

    def __call__(self, images):
        fine = self.down2(self.down1(images))
        coarse = self.side_coarse(self.down3(fine))
        enlarged = jnp.repeat(jnp.repeat(coarse, 2, axis=1), 2, axis=2)
        fine = self.smooth(self.side_fine(fine) + enlarged)
        scores, offsets = zip(*(self.predict(level) for level in (fine, coarse)))
        return jnp.concatenate(scores, axis=1), jnp.concatenate(offsets, axis=1)

    def predict(self, level):
        n = level.shape[0]
        x = self.tower(level)
        scores = self.classify(x).reshape(n, -1, CLASSES)
        offsets = self.regress(x).reshape(n, -1, 4)
        return scores, offsets


def decode(offsets, anchors):
    reach = jnp.exp(offsets) * anchors[:, 2:]
    sign = jnp.array([-1.0, -1.0, 1.0, 1.0])
    return jnp.tile(anchors[:, :2], 2) + sign * reach


def overlaps(p, q):
    """IoU and generalised IoU of two boxes (x0, y0, x1, y1)."""
    area = lambda box: (box[2] - box[0]) * (box[3] - box[1])
    width = jax.nn.relu(jnp.minimum(p[2], q[2]) - jnp.maximum(p[0], q[0]))
    height = jax.nn.relu(jnp.minimum(p[3], q[3]) - jnp.maximum(p[1], q[1]))
    shared = width * height
    union = area(p) + area(q) - shared
    around = area(jnp.concatenate([jnp.minimum(p[:2], q[:2]), jnp.maximum(p[2:], q[2:])]))
    return shared / union, shared / union + union / around - 1.0


def make_optimizer():
    return optax.chain(
        optax.add_decayed_weights(DECAY),
        optax.rmsprop(LR, decay=ALPHA, eps=EPS, eps_in_sqrt=False, momentum=MOMENTUM),
    )


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=LR, alpha=ALPHA, eps=EPS, momentum=MOMENTUM, weight_decay=DECAY
    )
    images, labels, boxes = make_batch()

    def loss_fn(images, labels, gt_boxes):
        logits, predicted = model(images)
        return detection_loss(logits, predicted, labels, gt_boxes)

    return stablenum_torch.program(
        loss_fn,
        torch.tensor(images),
        torch.tensor(labels).long(),
        torch.tensor(boxes),
        model=model,
        optimizer=optimizer,
    )


def right():
    graphdef, params = nnx.split(PyramidDetector(nnx.Rngs(3)), nnx.Param)
    images, labels, boxes = make_batch()
    anchors = jnp.asarray(make_anchors())

    def loss_fn(params, images, labels, boxes):
        scores, offsets = nnx.merge(graphdef, params)(images)
        iou, giou = jax.vmap(jax.vmap(overlaps))(decode(offsets, anchors), boxes)
        is_object = (labels >= 0) & (labels != BACKGROUND)
        counted = (labels != IGNORED).astype(scores.dtype)
        target = jax.nn.one_hot(labels, CLASSES) * jax.lax.stop_gradient(iou)[..., None]
        entropy = optax.sigmoid_binary_cross_entropy(scores, target)
        focal = jnp.square(jax.nn.sigmoid(scores) - target) * entropy
        classification = jnp.einsum("nak,na->", focal, counted)
        localisation = jnp.sum(jnp.where(is_object, 1.0 - giou, 0.0))
        objects = jnp.maximum(jnp.sum(is_object), 1)
        return (classification + BOX_WEIGHT * localisation) / objects

    args = (jnp.asarray(images.transpose(0, 2, 3, 1)), jnp.asarray(labels), jnp.asarray(boxes))
    return stablenum_jax.program(loss_fn, params, *args, optimizer=make_optimizer())
