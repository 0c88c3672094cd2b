"""Self-distillation (DINO) of a small ConvNeXt with a momentum teacher, trained with LARS.

PyTorch: batched NCHW/NHWC modules, DINO's per-parameter clipping, MoCo-v3's LARS.
JAX: equinox modules for one image, vmapped, optax.lars under optax.multi_transform.
"""
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

DIMS = (12, 16)
HEAD_HIDDEN, BOTTLENECK, PROTOTYPES = 24, 10, 20
STUDENT_TEMP, TEACHER_TEMP = 0.1, 0.04
CLIP = 0.05


def make_batch():
    rng = np.random.default_rng(21)
    image = rng.normal(size=(4, 3, 16, 16))
    view1 = image + 0.3 * rng.normal(size=image.shape)
    view2 = image[..., ::-1] + 0.3 * rng.normal(size=image.shape)
    center = 0.05 * rng.normal(size=(1, PROTOTYPES))
    return view1.astype(np.float32), view2.astype(np.float32), center.astype(np.float32)


# ----------------------------------------------------------------------------- PyTorch


class LayerNorm2d(nn.Module):
    """LayerNorm over the channels of an NCHW tensor."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim, layer_scale=0.2):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(layer_scale * torch.ones(dim))

    def forward(self, x):
        shortcut = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.norm(x)
        x = self.pwconv1(x)
        x = self.act(x)
        x = self.pwconv2(x)
        x = self.gamma * x
        return shortcut + x.permute(0, 3, 1, 2)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, DIMS[0], kernel_size=2, stride=2)
        self.stem_norm = LayerNorm2d(DIMS[0])
        self.block0 = ConvNeXtBlock(DIMS[0])
        self.down_norm = LayerNorm2d(DIMS[0])
        self.down = nn.Conv2d(DIMS[0], DIMS[1], kernel_size=2, stride=2)
        self.block1 = ConvNeXtBlock(DIMS[1])
        self.norm = nn.LayerNorm(DIMS[1], eps=1e-6)

    def forward(self, x):
        x = self.block0(self.stem_norm(self.stem(x)))
        x = self.block1(self.down(self.down_norm(x)))
        return self.norm(x.mean([-2, -1]))


class DINOHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(DIMS[1], HEAD_HIDDEN)
        self.fc2 = nn.Linear(HEAD_HIDDEN, BOTTLENECK)
        self.prototypes = nn.Parameter(torch.randn(PROTOTYPES, BOTTLENECK))

    def forward(self, x):
        x = self.fc2(F.gelu(self.fc1(x)))
        x = F.normalize(x, dim=-1)
        w = self.prototypes / self.prototypes.norm(dim=1, keepdim=True)
        return F.linear(x, w)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.head = DINOHead()

    def forward(self, x):
        return self.head(self.backbone(x))


class DINO(nn.Module):
    """The teacher is moved by the trainer between steps; here it only gives targets."""

    def __init__(self):
        super().__init__()
        self.student = Network()
        self.teacher = Network()
        self.teacher.requires_grad_(False)

    def forward(self, view1, view2, center):
        views = torch.cat([view1, view2])
        with torch.no_grad():
            teacher_out = F.softmax((self.teacher(views) - center) / TEACHER_TEMP, dim=-1).chunk(2)
        student_out = (self.student(views) / STUDENT_TEMP).chunk(2)
        total, terms = 0.0, 0
        for iq, q in enumerate(teacher_out):
            for iv, s in enumerate(student_out):
                if iv == iq:
                    continue
                loss = torch.sum(-q * F.log_softmax(s, dim=-1), dim=-1)
                total = total + loss.mean()
                terms += 1
        return total / terms


class LARS(torch.optim.Optimizer):
    """LARS without rate scaling or decay for norms and biases (MoCo v3), gradients clipped per tensor (DINO)."""

    def __init__(self, params, lr, weight_decay=0.0, momentum=0.9, trust_coefficient=0.001, clip=None):
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, trust_coefficient=trust_coefficient)
        super().__init__(params, defaults)
        self.clip = clip

    def clip_gradients(self):
        for group in self.param_groups:
            for p in group["params"]:
                clip_coef = self.clip / (p.grad.norm(2) + 1e-6)
                if clip_coef < 1:
                    p.grad.mul_(clip_coef)

    @torch.no_grad()
    def step(self, closure=None):
        if self.clip is not None:
            self.clip_gradients()
        for g in self.param_groups:
            for p in g["params"]:
                dp = p.grad
                if dp is None:
                    continue
                if p.ndim > 1:
                    dp = dp.add(p, alpha=g["weight_decay"])
                    param_norm = torch.norm(p)
                    update_norm = torch.norm(dp)
                    one = torch.ones_like(param_norm)
                    q = torch.where(
                        param_norm > 0.0,
                        torch.where(update_norm > 0, g["trust_coefficient"] * param_norm / update_norm, one),
                        one,
                    )
                    dp = dp.mul(q)
                state = self.state[p]
                if "mu" not in state:
                    state["mu"] = torch.zeros_like(p)
                mu = state["mu"]
                mu.mul_(g["momentum"]).add_(dp)
                p.add_(mu, alpha=-g["lr"])


# ----------------------------------------------------------------------------- JAX / equinox


class ChannelNorm(eqx.Module):
    weight: jax.Array
    bias: jax.Array

    def __init__(self, dim):
        self.weight = jnp.ones(dim)
        self.bias = jnp.zeros(dim)

    def __call__(self, x):
        centred = x - jnp.mean(x, axis=0)
        y = centred * jax.lax.rsqrt(jnp.var(x, axis=0) + 1e-6)
        return y * self.weight.reshape(-1, 1, 1) + self.bias.reshape(-1, 1, 1)


class Block(eqx.Module):
    dwconv: eqx.nn.Conv2d
    norm: eqx.nn.LayerNorm
    pwconv1: eqx.nn.Linear
    pwconv2: eqx.nn.Linear
    gamma: jax.Array

    def __init__(self, dim, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.dwconv = eqx.nn.Conv2d(dim, dim, 7, padding=3, groups=dim, key=k1)
        self.norm = eqx.nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = eqx.nn.Linear(dim, 4 * dim, key=k2)
        self.pwconv2 = eqx.nn.Linear(4 * dim, dim, key=k3)
        self.gamma = 0.2 * jnp.ones(dim)

    def __call__(self, x):
        channels, height, width = x.shape
        tokens = self.dwconv(x).reshape(channels, height * width).T
        tokens = jax.vmap(self.norm)(tokens)
        tokens = jax.vmap(self.pwconv1)(tokens)
        tokens = jax.nn.gelu(tokens, approximate=False)
        tokens = jax.vmap(self.pwconv2)(tokens)
        return x + (tokens * self.gamma).T.reshape(channels, height, width)


class ConvNeXt(eqx.Module):
    stem: eqx.nn.Conv2d
    stem_norm: ChannelNorm
    block0: Block
    down_norm: ChannelNorm
    down: eqx.nn.Conv2d
    block1: Block
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.stem = eqx.nn.Conv2d(3, DIMS[0], 2, stride=2, key=keys[0])
        self.stem_norm = ChannelNorm(DIMS[0])
        self.block0 = Block(DIMS[0], keys[1])
        self.down_norm = ChannelNorm(DIMS[0])
        self.down = eqx.nn.Conv2d(DIMS[0], DIMS[1], 2, stride=2, key=keys[2])
        self.block1 = Block(DIMS[1], keys[3])
        self.norm = eqx.nn.LayerNorm(DIMS[1], eps=1e-6)

    def __call__(self, image):
        x = self.stem_norm(self.stem(image))
        x = self.block0(x)
        x = self.down(self.down_norm(x))
        x = self.block1(x)
        return self.norm(jnp.mean(x, axis=(1, 2)))


class Head(eqx.Module):
    fc1: eqx.nn.Linear
    fc2: eqx.nn.Linear
    prototypes: jax.Array

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.fc1 = eqx.nn.Linear(DIMS[1], HEAD_HIDDEN, key=k1)
        self.fc2 = eqx.nn.Linear(HEAD_HIDDEN, BOTTLENECK, key=k2)
        self.prototypes = jax.random.normal(k3, (PROTOTYPES, BOTTLENECK))

    def __call__(self, x):
        z = self.fc2(jax.nn.gelu(self.fc1(x), approximate=False))
        z = z / jnp.maximum(jnp.linalg.norm(z), 1e-12)
        length = jnp.sqrt(jnp.sum(jnp.square(self.prototypes), axis=1))
        return (self.prototypes @ z) / length


class Encoder(eqx.Module):
    backbone: ConvNeXt
    head: Head

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.backbone = ConvNeXt(k1)
        self.head = Head(k2)

    def __call__(self, image):
        return self.head(self.backbone(image))


class Distillation(eqx.Module):
    student: Encoder
    teacher: Encoder

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.student = Encoder(k1)
        self.teacher = Encoder(k2)


def clip_each(limit):
    """DINO's clip_gradients: every parameter by its own norm."""

    def clip(g):
        coef = limit / (jnp.sqrt(jnp.sum(g * g)) + 1e-6)
        return jnp.where(coef < 1.0, coef * g, g)

    return optax.stateless(lambda updates, params: jax.tree.map(clip, updates))


def is_weight(path, p):
    return p.ndim > 1 and "bias" not in jax.tree_util.keystr(path[-1:])


def weight_mask(params):
    return jax.tree_util.tree_map_with_path(is_weight, params)


def which(params):
    label = lambda path, p: "frozen" if "teacher" in jax.tree_util.keystr(path) else "trained"
    return jax.tree_util.tree_map_with_path(label, params)


def make_optimizer():
    lars = optax.lars(
        0.3,
        weight_decay=1e-2,
        weight_decay_mask=weight_mask,
        trust_coefficient=0.02,
        trust_ratio_mask=weight_mask,
        momentum=0.9,
    )
    trained = optax.chain(clip_each(CLIP), lars)
    return optax.multi_transform({"trained": trained, "frozen": optax.set_to_zero()}, which)


# ----------------------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = DINO()
    optimizer = LARS(
        model.student.parameters(), lr=0.3, weight_decay=1e-2, momentum=0.9, trust_coefficient=0.02, clip=CLIP
    )
    view1, view2, center = (torch.tensor(a) for a in make_batch())

    def loss_fn(view1, view2, center):
        return model(view1, view2, center)

    return stablenum_torch.program(loss_fn, view1, view2, center, model=model, optimizer=optimizer)


def right():
    model = Distillation(jax.random.PRNGKey(0))
    view1, view2, center = (jnp.asarray(a) for a in make_batch())

    def loss_fn(model, view1, view2, center):
        teacher = jax.lax.stop_gradient(jnp.stack([jax.vmap(model.teacher)(v) for v in (view1, view2)]))
        targets = jax.nn.softmax((teacher - center) / TEACHER_TEMP, axis=-1)
        student = jnp.stack([jax.vmap(model.student)(v) for v in (view1, view2)])
        log_p = jax.nn.log_softmax(student / STUDENT_TEMP, axis=-1)
        cross = jnp.einsum("vbp,vbp->vb", targets, log_p[::-1])
        return -jnp.mean(cross)

    return stablenum_jax.program(loss_fn, model, view1, view2, center, optimizer=make_optimizer())
