"""Self-distillation (DINOv2: crops, masked patches, Sinkhorn, KoLeo): the original code and a cleaned-up version of it."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_torch

PATCH, GRID, LOCAL_GRID, BATCH = 4, 4, 3, 4
DIM, HEADS, DEPTH = 16, 2, 2
BOTTLENECK, PROTOTYPES = 8, 12
STUDENT_TEMP, TEACHER_TEMP, SINKHORN_ITERS = 0.1, 0.07, 3
IBOT_WEIGHT, KOLEO_WEIGHT = 0.8, 0.1
LR, MOMENTUM, DECAY, CLIP_GRAD = 0.05, 0.9, 0.01, 2.0


def make_batch():
    rng = np.random.default_rng(64)
    global_crops = rng.normal(size=(2 * BATCH, 3, GRID * PATCH, GRID * PATCH)).astype(np.float32)
    local_crops = rng.normal(size=(2 * BATCH, 3, LOCAL_GRID * PATCH, LOCAL_GRID * PATCH)).astype(np.float32)
    masks = np.zeros((2 * BATCH, GRID * GRID), bool)
    for row, count in zip(masks, (3, 8, 5, 2, 6, 4, 9, 3)):
        row[rng.permutation(GRID * GRID)[:count]] = True
    return tuple(torch.from_numpy(a) for a in (global_crops, local_crops, masks))


# ---------------------------------------------------------------- the original


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, DIM, kernel_size=PATCH, stride=PATCH)
        self.cls_token = nn.Parameter(0.5 * torch.randn(1, 1, DIM))
        self.mask_token = nn.Parameter(0.5 * torch.randn(1, DIM))
        self.pos_embed = nn.Parameter(0.5 * torch.randn(1, 1 + GRID * GRID, DIM))
        self.blocks = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(
                    DIM, HEADS, 2 * DIM, dropout=0.0, activation="gelu", layer_norm_eps=1e-6,
                    batch_first=True, norm_first=True,
                )
                for _ in range(DEPTH)
            ]
        )
        self.norm = nn.LayerNorm(DIM, eps=1e-6)

    def interpolate_pos_encoding(self, w0, h0):
        if w0 == GRID and h0 == GRID:
            return self.pos_embed
        class_pos_embed = self.pos_embed[:, :1]
        patch_pos_embed = self.pos_embed[:, 1:].reshape(1, GRID, GRID, DIM).permute(0, 3, 1, 2)
        # a small offset against floating point error, see the discussion at the DINO repository
        patch_pos_embed = F.interpolate(
            patch_pos_embed, scale_factor=((w0 + 0.1) / GRID, (h0 + 0.1) / GRID), mode="bicubic"
        )
        patch_pos_embed = patch_pos_embed.permute(0, 2, 3, 1).view(1, -1, DIM)
        return torch.cat((class_pos_embed, patch_pos_embed), dim=1)

    def forward(self, x, masks=None):
        w0, h0 = x.shape[-2] // PATCH, x.shape[-1] // PATCH
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        if masks is not None:
            x = torch.where(masks.unsqueeze(-1), self.mask_token.unsqueeze(0), x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = x + self.interpolate_pos_encoding(w0, h0)
        for blk in self.blocks:
            x = blk(x)
        x = self.norm(x)
        return x[:, 0], x[:, 1:]


class DINOHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, BOTTLENECK))
        self.prototypes = nn.Parameter(torch.randn(PROTOTYPES, BOTTLENECK))

    def forward(self, x):
        x = self.mlp(x)
        x = F.normalize(x, dim=-1, p=2, eps=1e-6)
        return F.linear(x, self.prototypes / self.prototypes.norm(dim=1, keepdim=True))


class MetaArch(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.ModuleDict({"backbone": VisionTransformer(), "head": DINOHead()})
        self.teacher = nn.ModuleDict({"backbone": VisionTransformer(), "head": DINOHead()})
        for p in self.teacher.parameters():
            p.requires_grad = False


@torch.no_grad()
def sinkhorn_knopp_teacher(teacher_output):
    Q = torch.exp(teacher_output / TEACHER_TEMP).t()
    K, B = Q.shape
    Q /= torch.sum(Q)
    for _ in range(SINKHORN_ITERS):
        Q /= torch.sum(Q, dim=1, keepdim=True)
        Q /= K
        Q /= torch.sum(Q, dim=0, keepdim=True)
        Q /= B
    Q *= B
    return Q.t()


class KoLeoLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.pdist = nn.PairwiseDistance(2, eps=1e-8)

    def pairwise_NNs_inner(self, x):
        dots = torch.mm(x, x.t())
        dots.view(-1)[:: (x.shape[0] + 1)].fill_(-1)
        return torch.max(dots, dim=1)[1]

    def forward(self, student_output, eps=1e-8):
        student_output = F.normalize(student_output, eps=eps, p=2, dim=-1)
        with torch.no_grad():
            I = self.pairwise_NNs_inner(student_output)
        distances = self.pdist(student_output, student_output[I])
        return -torch.log(distances + eps).mean()


# ---------------------------------------------------------------- cleaned up


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM, eps=1e-6), nn.LayerNorm(DIM, eps=1e-6)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.fc1, self.fc2 = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def attend(self, x):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        weights = (q @ k.mT / (DIM // HEADS) ** 0.5).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.cls = nn.Parameter(torch.zeros(1, 1, DIM))
        self.hidden_patch = nn.Parameter(torch.zeros(1, DIM))
        self.positions = nn.Parameter(torch.zeros(1, 1 + GRID * GRID, DIM))
        self.layers = nn.Sequential(*[Layer() for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(DIM, eps=1e-6)

    def patch_positions(self, side):
        grid = self.positions[:, 1:].mT.unflatten(-1, (GRID, GRID))
        if side != GRID:
            ratio = (side + 0.1) / GRID
            grid = F.interpolate(grid, scale_factor=ratio, mode="bicubic")
        return grid.flatten(2).mT

    def forward(self, images, hidden=None):
        tokens = self.patches(images)
        side = tokens.shape[-1]
        tokens = tokens.flatten(2).mT
        if hidden is not None:
            seen = (~hidden)[..., None].to(tokens.dtype)
            tokens = tokens * seen + self.hidden_patch * (1 - seen)
        tokens = tokens + self.patch_positions(side)
        first = (self.cls + self.positions[:, :1]).expand(len(tokens), -1, -1)
        out = self.norm(self.layers(torch.cat([first, tokens], dim=1)))
        return out[:, 0], out[:, 1:]


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, BOTTLENECK)
        self.weight = nn.Parameter(torch.randn(PROTOTYPES, BOTTLENECK))

    def forward(self, x):
        x = self.fc2(F.gelu(self.fc1(x)))
        return F.normalize(x, dim=-1, eps=1e-6) @ F.normalize(self.weight, dim=1).mT


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = Backbone(), Head()


@torch.no_grad()
def balanced_targets(logits):
    log_q = logits / TEACHER_TEMP
    for _ in range(SINKHORN_ITERS):
        log_q = log_q - log_q.logsumexp(dim=0)
        log_q = log_q.log_softmax(dim=1)
    return log_q.exp()


def spread(features):
    unit = F.normalize(features, dim=-1, eps=1e-8)
    similarity = (unit @ unit.mT).detach()
    similarity = similarity - 4.0 * torch.eye(len(unit))
    nearest = unit[similarity.argmax(dim=1)]
    distance = (unit - nearest + 1e-8).norm(dim=1)
    return -torch.log(distance + 1e-8).mean()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = Network(), Network().requires_grad_(False)

    def forward(self, global_crops, local_crops, masks):
        log_p = lambda logits: torch.log_softmax(logits / STUDENT_TEMP, dim=-1)
        cls, patches = self.student.backbone(global_crops, masks)
        local_cls, _ = self.student.backbone(local_crops)
        cls_target, patch_target = self.teacher.backbone(global_crops)
        cls_target = balanced_targets(self.teacher.head(cls_target)).unflatten(0, (2, -1))
        patch_target = balanced_targets(self.teacher.head(patch_target[masks]))

        views = log_p(self.student.head(torch.cat([cls, local_cls]))).unflatten(0, (4, -1))
        entropies = -torch.einsum("tbk,vbk->tv", cls_target, views) / BATCH
        other_view = ~torch.eye(2, 4, dtype=torch.bool)
        between_views = entropies[other_view].mean()

        per_patch = -(patch_target * log_p(self.student.head(patches[masks]))).sum(-1)
        share = (masks / masks.sum(1, keepdim=True))[masks]
        hidden_patches = (per_patch * share).sum() / len(masks)

        uniformity = sum(spread(half) for half in cls.chunk(2))
        return between_views + IBOT_WEIGHT * hidden_patches + KOLEO_WEIGHT * uniformity


# ---------------------------------------------------------------- the pair


def clip_gradients(model, clip):
    for p in model.parameters():
        if p.grad is not None:
            param_norm = p.grad.norm(2)
            clip_coef = clip / (param_norm + 1e-6)
            if clip_coef < 1:
                p.grad.mul_(clip_coef)


def left():
    torch.manual_seed(9)
    model = MetaArch()
    student, teacher = model.student, model.teacher
    koleo_loss = KoLeoLoss()
    optimizer = torch.optim.SGD(student.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    optimizer.register_step_pre_hook(lambda *_: clip_gradients(student, CLIP_GRAD))

    def loss_fn(global_crops, local_crops, masks):
        with torch.no_grad():
            t_cls, t_patch = teacher.backbone(global_crops)
            t_cls = sinkhorn_knopp_teacher(teacher.head(t_cls)).chunk(2)
            t_patch = sinkhorn_knopp_teacher(teacher.head(t_patch[masks]))

        s_cls, s_patch = student.backbone(global_crops, masks)
        l_cls, _ = student.backbone(local_crops)
        views = student.head(s_cls).chunk(2) + student.head(l_cls).chunk(2)

        dino_loss, n_loss_terms = 0.0, 0
        for iq, q in enumerate(t_cls):
            for v, s in enumerate(views):
                if v == iq:
                    continue
                lsm = F.log_softmax(s / STUDENT_TEMP, dim=-1)
                dino_loss += torch.sum(-q * lsm, dim=-1).mean()
                n_loss_terms += 1
        dino_loss = dino_loss / n_loss_terms

        masks_weight = (1 / masks.sum(-1).clamp(min=1.0)).unsqueeze(-1).expand_as(masks)[masks]
        s_masked = student.head(s_patch[masks])
        ibot_loss = torch.sum(t_patch * F.log_softmax(s_masked / STUDENT_TEMP, dim=-1), dim=-1) * masks_weight
        ibot_loss = -ibot_loss.sum() / masks.shape[0]

        loss = dino_loss + IBOT_WEIGHT * ibot_loss
        for x in s_cls.chunk(2):
            loss = loss + KOLEO_WEIGHT * koleo_loss(x)
        return loss

    return stablenum_torch.program(loss_fn, *make_batch(), model=model, optimizer=optimizer)


def right():
    torch.manual_seed(10)
    pair = Pair()
    trained = list(pair.student.parameters())
    optimizer = torch.optim.SGD(trained, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)

    def clip_each(*_):
        for p in trained:
            nn.utils.clip_grad_norm_(p, CLIP_GRAD)

    optimizer.register_step_pre_hook(clip_each)

    def loss_fn(global_crops, local_crops, masks):
        return pair(global_crops, local_crops, masks)

    return stablenum_torch.program(loss_fn, *make_batch(), model=pair, optimizer=optimizer)
