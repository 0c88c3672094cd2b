"""A one-stage anchor-free detector: the first version after the model of torchvision, and a rewrite."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_torch

WIDTH, CLASSES, GROUPS, IMAGE = 12, 4, 3, 32
STRIDES = (4, 8)
ALPHA, GAMMA, BOX_WEIGHT, PRIOR = 0.25, 2.0, 2.0, 0.1
LR, MOMENTUM, DECAY, CLIP = 0.02, 0.9, 0.01, 0.5
WARMUP, FACTOR = 50, 0.1


def locations():
    points = []
    for stride in STRIDES:
        centre = (np.arange(IMAGE // stride) + 0.5) * stride
        y, x = np.meshgrid(centre, centre, indexing="ij")
        points.append(np.stack([x.ravel(), y.ravel()], 1))
    return np.concatenate(points)


def frozen_statistics(seed):
    rng = np.random.default_rng(seed)
    values = {
        "weight": rng.uniform(0.7, 1.3, WIDTH),
        "bias": rng.normal(size=WIDTH) * 0.2,
        "running_mean": rng.normal(size=WIDTH) * 0.2,
        "running_var": rng.uniform(0.2, 0.8, WIDTH),
    }
    return {name: torch.tensor(value.astype(np.float32)) for name, value in values.items()}


def make_batch():
    """Images, for each location the class (or -1), and the box of its object."""
    rng = np.random.default_rng(17)
    images = rng.normal(size=(3, 3, IMAGE, IMAGE))
    points = locations()
    labels = np.full((3, len(points)), -1)
    boxes = np.zeros((3, len(points), 4))
    for i, count in enumerate((1, 3, 2)):
        for _ in range(count):
            low = rng.uniform(0, 18, size=2)
            box = np.concatenate([low, low + rng.uniform(6, 13, size=2)])
            kind = rng.integers(CLASSES)
            inside = ((points > box[:2]) & (points < box[2:])).all(1)
            labels[i, inside], boxes[i, inside] = kind, box
            x1, y1, x2, y2 = box.astype(int)
            images[i, kind % 3, y1:y2, x1:x2] += 1.5
    return images.astype(np.float32), labels, boxes.astype(np.float32)


# ---------------------------------------------------------------- the first version


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, num_features, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.ones(num_features))
        self.register_buffer("bias", torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x):
        w, b, rv, rm = (
            t.reshape(1, -1, 1, 1) for t in (self.weight, self.bias, self.running_var, self.running_mean)
        )
        scale = w * (rv + self.eps).rsqrt()
        return x * scale + (b - rm * scale)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1, bias=False)
        self.bn1 = FrozenBatchNorm2d(WIDTH)
        self.pool = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.bn2 = FrozenBatchNorm2d(WIDTH)
        self.conv3 = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1, bias=False)
        self.bn3 = FrozenBatchNorm2d(WIDTH)
        for seed, bn in enumerate((self.bn1, self.bn2, self.bn3)):
            bn.load_state_dict(frozen_statistics(seed))

    def forward(self, x):
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        c1 = F.relu(self.bn2(self.conv2(x)))
        c2 = F.relu(self.bn3(self.conv3(c1)))
        return [c1, c2]


class FeaturePyramid(nn.Module):
    def __init__(self, widths, out_channels):
        super().__init__()
        self.inner_blocks = nn.ModuleList([nn.Conv2d(n, out_channels, 1) for n in widths])
        self.layer_blocks = nn.ModuleList([nn.Conv2d(out_channels, out_channels, 3, padding=1) for _ in widths])

    def forward(self, features):
        last = self.inner_blocks[-1](features[-1])
        results = [self.layer_blocks[-1](last)]
        for i in reversed(range(len(features) - 1)):
            lateral = self.inner_blocks[i](features[i])
            last = lateral + F.interpolate(last, size=lateral.shape[-2:], mode="nearest")
            results.insert(0, self.layer_blocks[i](last))
        return results


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(GROUPS, WIDTH), nn.ReLU()
        )
        self.cls_logits = nn.Conv2d(WIDTH, CLASSES, 3, padding=1)
        self.bbox_reg = nn.Conv2d(WIDTH, 4, 3, padding=1)
        self.quality = nn.Conv2d(WIDTH, 1, 3, padding=1)
        self.scales = nn.Parameter(torch.ones(len(STRIDES)))
        nn.init.constant_(self.cls_logits.bias, -float(np.log((1 - PRIOR) / PRIOR)))

    def forward(self, features):
        logits, sides, quality = [], [], []
        for level, x in enumerate(features):
            x = self.tower(x)
            logits.append(self.cls_logits(x).permute(0, 2, 3, 1).reshape(len(x), -1, CLASSES))
            reg = torch.exp(self.scales[level] * self.bbox_reg(x)) * STRIDES[level]
            sides.append(reg.permute(0, 2, 3, 1).reshape(len(x), -1, 4))
            quality.append(self.quality(x).flatten(1))
        return torch.cat(logits, 1), torch.cat(sides, 1), torch.cat(quality, 1)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.fpn = FeaturePyramid([WIDTH, WIDTH], WIDTH)
        self.head = Head()
        self.register_buffer("points", torch.tensor(locations(), dtype=torch.get_default_dtype()))

    def forward(self, images):
        logits, sides, quality = self.head(self.fpn(self.backbone(images)))
        boxes = torch.cat([self.points - sides[..., :2], self.points + sides[..., 2:]], -1)
        return logits, boxes, quality


def sigmoid_focal_loss(inputs, targets, alpha, gamma):
    p = torch.sigmoid(inputs)
    ce_loss = F.binary_cross_entropy_with_logits(inputs, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    alpha_t = alpha * targets + (1 - alpha) * (1 - targets)
    return (alpha_t * ce_loss * ((1 - p_t) ** gamma)).sum()


def paired_iou(a, b):
    inter = (torch.min(a[:, 2:], b[:, 2:]) - torch.max(a[:, :2], b[:, :2])).clamp(min=0).prod(1)
    area_a, area_b = (a[:, 2:] - a[:, :2]).prod(1), (b[:, 2:] - b[:, :2]).prod(1)
    union = area_a + area_b - inter
    return inter / (union + 1e-7), union


def generalized_box_iou_loss(a, b):
    iou, union = paired_iou(a, b)
    hull = (torch.max(a[:, 2:], b[:, 2:]) - torch.min(a[:, :2], b[:, :2])).prod(1)
    miou = iou - (hull - union) / (hull + 1e-7)
    return (1 - miou).sum()


def detection_loss(outputs, labels, targets):
    logits, boxes, quality = outputs
    positive = labels >= 0
    count = positive.sum().clamp(min=1)
    onehot = F.one_hot(labels.clamp(min=0), CLASSES) * positive[..., None]
    cls_loss = sigmoid_focal_loss(logits, onehot.to(logits.dtype), alpha=ALPHA, gamma=GAMMA)
    found, wanted = boxes[positive], targets[positive]
    box_loss = generalized_box_iou_loss(found, wanted)
    overlap = paired_iou(found, wanted)[0].detach()
    quality_loss = F.binary_cross_entropy_with_logits(quality[positive], overlap, reduction="sum")
    return (cls_loss + BOX_WEIGHT * box_loss + quality_loss) / count


def make_sgd(model):
    weights = [p for n, p in model.named_parameters() if p.ndim > 1]
    others = [p for n, p in model.named_parameters() if p.ndim == 1]
    optimizer = torch.optim.SGD(
        [{"params": weights, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0, "lr": 2 * LR}],
        lr=LR,
        momentum=MOMENTUM,
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=FACTOR, total_iters=WARMUP)

    def before_step(*_):
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


# ---------------------------------------------------------------- the rewrite


class ConvFixedNorm(nn.Module):
    """A convolution and the fixed affine map that a frozen batch norm is."""

    def __init__(self, n_in, stride, seed):
        super().__init__()
        self.conv = nn.Conv2d(n_in, WIDTH, 3, stride=stride, padding=1, bias=False)
        for name, value in frozen_statistics(seed).items():
            self.register_buffer(name, value)

    def forward(self, x):
        x = F.batch_norm(
            self.conv(x), self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=1e-5
        )
        return x.relu()


class GroupStandardize(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        groups = x.unflatten(1, (GROUPS, -1))
        var, mean = torch.var_mean(groups, dim=(2, 3, 4), correction=0, keepdim=True)
        x = ((groups - mean) / torch.sqrt(var + 1e-5)).flatten(1, 2)
        return x * self.weight[:, None, None] + self.bias[:, None, None]


class CleanDetector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = ConvFixedNorm(3, 2, 0)
        self.stage1 = ConvFixedNorm(WIDTH, 1, 1)
        self.stage2 = ConvFixedNorm(WIDTH, 2, 2)
        self.inner1, self.inner2 = nn.Conv2d(WIDTH, WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 1)
        self.layer1, self.layer2 = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.tower = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.tower_norm = GroupStandardize()
        self.to_class = nn.Conv2d(WIDTH, CLASSES, 3, padding=1)
        self.to_sides = nn.Conv2d(WIDTH, 4, 3, padding=1)
        self.to_quality = nn.Conv2d(WIDTH, 1, 3, padding=1)
        self.scales = nn.Parameter(torch.ones(len(STRIDES)))
        self.to_class.bias.data.fill_(-float(np.log((1 - PRIOR) / PRIOR)))
        self.register_buffer("points", torch.tensor(locations(), dtype=torch.get_default_dtype()))

    def pyramid(self, images):
        fine = self.stage1(F.max_pool2d(self.stem(images), 2))
        coarse = self.stage2(fine)
        coarse = self.inner2(coarse)
        top_down = coarse.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
        fine = self.inner1(fine) + top_down
        return self.layer1(fine), self.layer2(coarse)

    def forward(self, images):
        rows = []
        for stride, scale, x in zip(STRIDES, self.scales, self.pyramid(images)):
            x = self.tower_norm(self.tower(x)).relu()
            sides = (scale * self.to_sides(x)).exp() * stride
            maps = torch.cat([self.to_class(x), sides, self.to_quality(x)], dim=1)
            rows.append(maps.flatten(2).transpose(1, 2))
        logits, sides, quality = torch.cat(rows, 1).split([CLASSES, 4, 1], dim=2)
        left_top, right_bottom = sides.chunk(2, dim=2)
        boxes = torch.cat([self.points - left_top, self.points + right_bottom], dim=2)
        return logits, boxes, quality.squeeze(2)


def focal(logits, targets):
    p = logits.sigmoid()
    p_t = torch.where(targets > 0, p, 1 - p)
    alpha_t = torch.where(targets > 0, ALPHA, 1 - ALPHA)
    loss = -alpha_t * (1 - p_t) ** GAMMA * F.logsigmoid(torch.where(targets > 0, logits, -logits))
    return loss.sum()


def box_overlaps(a, b):
    """Intersection over union, and the generalized one."""
    ax1, ay1, ax2, ay2 = a.unbind(1)
    bx1, by1, bx2, by2 = b.unbind(1)
    width = (torch.minimum(ax2, bx2) - torch.maximum(ax1, bx1)).relu()
    height = (torch.minimum(ay2, by2) - torch.maximum(ay1, by1)).relu()
    inter = width * height
    union = (ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - inter
    hull_w = torch.maximum(ax2, bx2) - torch.minimum(ax1, bx1)
    hull_h = torch.maximum(ay2, by2) - torch.minimum(ay1, by1)
    hull = hull_w * hull_h
    iou = inter / (union + 1e-7)
    return iou, iou - (hull - union) / (hull + 1e-7)


def clean_loss(outputs, labels, targets):
    logits, boxes, quality = outputs
    image, place = torch.nonzero(labels >= 0, as_tuple=True)
    total = max(len(image), 1)
    onehot = torch.zeros_like(logits)
    onehot[image, place, labels[image, place]] = 1
    iou, giou = box_overlaps(boxes[image, place], targets[image, place])
    q = quality[image, place]
    iou = iou.detach()
    quality_loss = F.softplus(q) - iou * q
    return focal(logits, onehot) / total + (BOX_WEIGHT * (1 - giou) + quality_loss).sum() / total


def clip_by_norm(parameters, limit):
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor)


def make_clean_sgd(model):
    groups = [
        {"params": [p], "lr": LR, "weight_decay": DECAY} if p.dim() > 1 else {"params": [p], "lr": 2 * LR}
        for p in model.parameters()
    ]
    optimizer = torch.optim.SGD(groups, momentum=MOMENTUM)
    warmup = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: FACTOR + (1 - FACTOR) * min(step / WARMUP, 1)
    )
    optimizer.register_step_pre_hook(lambda *_: clip_by_norm(list(model.parameters()), CLIP))
    optimizer.register_step_post_hook(lambda *_: warmup.step())
    return optimizer


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = Detector()

    def loss_fn(images, labels, boxes):
        return detection_loss(model(images), labels, boxes)

    batch = [torch.from_numpy(a) for a in make_batch()]
    return stablenum_torch.program(loss_fn, *batch, model=model, optimizer=make_sgd(model))


def right():
    torch.manual_seed(6)
    model = CleanDetector()
    batch = [torch.from_numpy(a) for a in make_batch()]
    return stablenum_torch.program(
        lambda images, labels, boxes: clean_loss(model(images), labels, boxes),
        *batch,
        model=model,
        optimizer=make_clean_sgd(model),
    )
