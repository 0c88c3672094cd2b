"""Vision transformer fine-tuned with a flip-consistency term: timm-like in PyTorch, flax.linen in JAX."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

SIZE, PATCH, DIM, HEADS, DEPTH, CLASSES = 16, 4, 24, 3, 2, 7
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LAYER_SCALE, SMOOTHING, CONSISTENCY = 0.5, 0.1, 2.0
LR, DECAY, MAX_NORM = 0.03, 0.05, 0.5


def make_batch():
    rng = np.random.default_rng(11)
    images = rng.integers(0, 256, (4, SIZE, SIZE, 3)).astype(np.uint8)
    images[1, :, SIZE // 2 :] //= 3
    images[2, : SIZE // 2] //= 4
    labels = rng.integers(0, CLASSES, 4).astype(np.int32)
    return images, labels


# ---------------------------------------------------------------- PyTorch


class PatchEmbed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Conv2d(3, DIM, kernel_size=PATCH, stride=PATCH)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = (DIM // HEADS) ** -0.5
        self.qkv = torch.nn.Linear(DIM, DIM * 3)
        self.proj = torch.nn.Linear(DIM, DIM)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(DIM, 4 * DIM)
        self.act = torch.nn.GELU()
        self.fc2 = torch.nn.Linear(4 * DIM, DIM)
        torch.nn.init.kaiming_normal_(self.fc1.weight)
        torch.nn.init.kaiming_normal_(self.fc2.weight)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class LayerScale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = torch.nn.Parameter(LAYER_SCALE * torch.ones(DIM))

    def forward(self, x):
        return x * self.gamma


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(DIM, eps=1e-6)
        self.attn = Attention()
        self.ls1 = LayerScale()
        self.norm2 = torch.nn.LayerNorm(DIM, eps=1e-6)
        self.mlp = Mlp()
        self.ls2 = LayerScale()

    def forward(self, x):
        x = x + self.ls1(self.attn(self.norm1(x)))
        x = x + self.ls2(self.mlp(self.norm2(x)))
        return x


class VisionTransformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.cls_token = torch.nn.Parameter(0.2 * torch.randn(1, 1, DIM))
        self.pos_embed = torch.nn.Parameter(0.2 * torch.randn(1, (SIZE // PATCH) ** 2 + 1, DIM))
        self.blocks = torch.nn.Sequential(*[Block() for _ in range(DEPTH)])
        self.norm = torch.nn.LayerNorm(DIM, eps=1e-6)
        self.head = torch.nn.Linear(DIM, CLASSES)

    def forward(self, x):
        x = self.patch_embed(x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = x + self.pos_embed
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0])


def param_groups(model):
    decay, rest = [], []
    for name, p in model.named_parameters():
        skip = p.ndim == 1 or name in ("cls_token", "pos_embed")
        (rest if skip else decay).append(p)
    return [{"params": decay, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]


def clip_hook(optimizer, args, kwargs):
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    norm = torch.sqrt(sum((g**2).sum() for g in grads))
    for g in grads:
        g.mul_(torch.clamp(MAX_NORM / norm, max=1.0))


# ---------------------------------------------------------------- JAX


class MlpBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        x = nn.Dense(4 * width, name="up")(x)
        x = nn.gelu(x, approximate=False)
        return nn.Dense(width, name="down")(x)


class EncoderBlock(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        gamma_attn = self.param("gamma_attn", nn.initializers.constant(LAYER_SCALE), (DIM,))
        gamma_mlp = self.param("gamma_mlp", nn.initializers.constant(LAYER_SCALE), (DIM,))
        y = nn.LayerNorm(name="ln_attn")(inputs)
        y = nn.MultiHeadDotProductAttention(num_heads=HEADS, name="attn")(y)
        x = gamma_attn * y + inputs
        y = nn.LayerNorm(name="ln_mlp")(x)
        y = MlpBlock(name="mlp")(y)
        return x + gamma_mlp * y


class ViT(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(DIM, (PATCH, PATCH), strides=(PATCH, PATCH), padding="VALID", name="embedding")(x)
        n, h, w, c = x.shape
        x = x.reshape(n, h * w, c)
        cls = self.param("cls", nn.initializers.normal(0.2), (1, 1, c))
        pos = self.param("pos", nn.initializers.normal(0.2), (1, h * w + 1, c))
        x = jnp.concatenate([jnp.tile(cls, (n, 1, 1)), x], axis=1) + pos
        for i in range(DEPTH):
            x = EncoderBlock(name=f"block{i}")(x)
        x = nn.LayerNorm(name="encoder_norm")(x)
        token = x[:, 0]
        return nn.Dense(CLASSES, name="head")(token)


def normalise(images):
    return (images / 255.0 - jnp.asarray(MEAN)) / jnp.asarray(STD)


def smoothed_cross_entropy(logits, labels):
    targets = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), SMOOTHING)
    return optax.softmax_cross_entropy(logits, targets).mean()


def consistency_loss(logits, flipped_logits):
    target = jax.lax.stop_gradient(nn.softmax(flipped_logits))
    divergence = target * (jnp.log(target) - nn.log_softmax(logits))
    return divergence.sum(axis=-1).mean()


def decay_mask(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)


def make_optimizer():
    return optax.chain(
        optax.clip_by_global_norm(MAX_NORM),
        optax.add_decayed_weights(DECAY, mask=decay_mask),
        optax.sgd(LR, momentum=0.9),
    )


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = VisionTransformer()
    optimizer = torch.optim.SGD(param_groups(model), lr=LR, momentum=0.9)
    optimizer.register_step_pre_hook(clip_hook)
    mean = torch.tensor(MEAN).view(1, 3, 1, 1)
    std = torch.tensor(STD).view(1, 3, 1, 1)
    images, labels = make_batch()

    def loss_fn(images, labels):
        x = (images.permute(0, 3, 1, 2) / 255 - mean) / std
        logits = model(x)
        with torch.no_grad():
            target = model(x.flip(-1)).softmax(dim=-1)
        kl = F.kl_div(F.log_softmax(logits, dim=-1), target, reduction="batchmean")
        return F.cross_entropy(logits, labels, label_smoothing=SMOOTHING) + CONSISTENCY * kl

    return stablenum_torch.program(
        loss_fn, torch.tensor(images), torch.tensor(labels).long(), model=model, optimizer=optimizer
    )


def right():
    model = ViT()
    images, labels = make_batch()
    params = model.init(jax.random.key(1), jnp.zeros((1, SIZE, SIZE, 3)))["params"]

    def loss_fn(params, images, labels):
        x = normalise(images)
        logits = model.apply({"params": params}, x)
        flipped = model.apply({"params": params}, x[:, :, ::-1])
        return smoothed_cross_entropy(logits, labels) + CONSISTENCY * consistency_loss(logits, flipped)

    return stablenum_jax.program(
        loss_fn, params, jnp.asarray(images), jnp.asarray(labels), optimizer=make_optimizer()
    )
