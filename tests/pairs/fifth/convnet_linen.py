"""ConvNeXt-V2 stage, then a MobileNet-like stage with squeeze-excite: PyTorch original, flax.linen port (NHWC)."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import flax.linen as fnn
import jax
import jax.numpy as jnp
import optax

import stablenum_jax
import stablenum_torch

CLASSES, DIM, OUT = 7, 12, 16
STEP = 1.0 / 16.0


def make_batch():
    rng = np.random.default_rng(21)
    x = rng.normal(size=(6, 3, 16, 16)).astype(np.float32)
    y = rng.integers(0, CLASSES, size=(6,)).astype(np.int64)
    return x, y


# ---------------------------------------------------------------- PyTorch

class LayerNorm2d(nn.Module):
    def __init__(self, channels, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class GRN(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(0.5 * torch.randn(1, 1, 1, dim))
        self.beta = nn.Parameter(0.1 * torch.randn(1, 1, 1, dim))

    def forward(self, x):
        Gx = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        Nx = Gx / (Gx.mean(dim=-1, keepdim=True) + 1e-6)
        return self.gamma * (x * Nx) + self.beta + x


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=5, padding=2, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.grn = GRN(4 * dim)
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(0.5 * torch.ones(dim))

    def forward(self, x):
        shortcut = x
        x = self.dwconv(x).permute(0, 2, 3, 1)
        x = self.act(self.pwconv1(self.norm(x)))
        x = self.grn(x)
        x = self.gamma * self.pwconv2(x)
        return shortcut + x.permute(0, 3, 1, 2)


class SqueezeExcite(nn.Module):
    def __init__(self, channels, reduced):
        super().__init__()
        self.conv_reduce = nn.Conv2d(channels, reduced, 1)
        self.conv_expand = nn.Conv2d(reduced, channels, 1)

    def forward(self, x):
        s = F.adaptive_avg_pool2d(x, 1)
        s = F.silu(self.conv_reduce(s))
        return x * torch.sigmoid(self.conv_expand(s))


class InvertedResidual(nn.Module):
    def __init__(self, inp, out, expand=3):
        super().__init__()
        mid = inp * expand
        self.conv_pw = nn.Conv2d(inp, mid, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(mid)
        self.conv_dw = nn.Conv2d(mid, mid, 3, stride=2, padding=1, groups=mid, bias=False)
        self.bn2 = nn.BatchNorm2d(mid)
        self.se = SqueezeExcite(mid, 6)
        self.conv_pwl = nn.Conv2d(mid, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)

    def forward(self, x):
        x = F.silu(self.bn1(self.conv_pw(x)))
        x = F.silu(self.bn2(self.conv_dw(x)))
        x = self.se(x)
        return self.bn3(self.conv_pwl(x))


class FakeQuantize(nn.Module):
    def forward(self, x):
        q = torch.clamp(torch.round(x / STEP), -128, 127) * STEP
        return x + (q - x).detach()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, DIM, kernel_size=2, stride=2)
        self.stem_norm = LayerNorm2d(DIM)
        self.block = ConvNeXtBlock(DIM)
        self.mb = InvertedResidual(DIM, OUT)
        self.quant = FakeQuantize()
        self.fc = nn.Linear(OUT, CLASSES)

    def forward(self, x):
        x = self.stem_norm(self.stem(x))
        x = self.block(x)
        x = self.mb(x)
        x = x.relu().mean(dim=(2, 3))
        x = self.quant(x)
        return self.fc(x)


def left():
    torch.manual_seed(0)
    model = Net()
    model.train()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3, alpha=0.9, eps=1e-3, momentum=0.9,
                                    weight_decay=1e-2)
    x, y = make_batch()

    def loss_fn(x, y):
        return F.cross_entropy(model(x), y)

    return stablenum_torch.program(loss_fn, torch.tensor(x), torch.tensor(y), model=model, optimizer=optimizer)


# ---------------------------------------------------------------- JAX (linen)

class ResponseNorm(fnn.Module):
    @fnn.compact
    def __call__(self, feats):
        channels = feats.shape[-1]
        gamma = self.param("gamma", fnn.initializers.zeros, (channels,))
        beta = self.param("beta", fnn.initializers.zeros, (channels,))
        energy = jnp.sqrt(jnp.einsum("bhwc,bhwc->bc", feats, feats))
        ratio = energy / (energy.mean(axis=-1, keepdims=True) + 1e-6)
        return feats * (1.0 + gamma * ratio[:, None, None, :]) + beta


class NextBlock(fnn.Module):
    dim: int

    @fnn.compact
    def __call__(self, feats):
        h = fnn.Conv(self.dim, (5, 5), padding="SAME", feature_group_count=self.dim, name="depthwise")(feats)
        h = fnn.LayerNorm(epsilon=1e-6, name="ln")(h)
        h = fnn.Dense(4 * self.dim, name="expand")(h)
        h = jax.nn.gelu(h, approximate=False)
        h = ResponseNorm(name="response")(h)
        h = fnn.Dense(self.dim, name="project")(h)
        layer_scale = self.param("layer_scale", fnn.initializers.constant(1e-6), (self.dim,))
        return feats + layer_scale * h


class Gate(fnn.Module):
    reduced: int

    @fnn.compact
    def __call__(self, feats):
        s = feats.mean(axis=(1, 2))
        s = fnn.Dense(self.reduced, name="squeeze")(s)
        s = s * jax.nn.sigmoid(s)
        s = fnn.Dense(feats.shape[-1], name="excite")(s)
        return feats * jax.nn.sigmoid(s)[:, None, None, :]


class MBConv(fnn.Module):
    out: int
    expand: int = 3

    @fnn.compact
    def __call__(self, feats, train):
        def norm(name):
            return fnn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5, name=name)

        mid = feats.shape[-1] * self.expand
        h = fnn.Dense(mid, use_bias=False, name="pointwise")(feats)
        h = fnn.swish(norm("norm_a")(h))
        h = fnn.Conv(mid, (3, 3), strides=2, padding=1, feature_group_count=mid, use_bias=False,
                     name="spatial")(h)
        h = fnn.swish(norm("norm_b")(h))
        h = Gate(6, name="gate")(h)
        h = fnn.Dense(self.out, use_bias=False, name="linear")(h)
        return norm("norm_c")(h)


def quantized(v):
    steps = jnp.clip(jnp.round(v / STEP), -128, 127)
    return v + jax.lax.stop_gradient(steps * STEP - v)


class ImageModel(fnn.Module):
    @fnn.compact
    def __call__(self, images, train=True):
        h = fnn.Conv(DIM, (2, 2), strides=(2, 2), padding="VALID", name="patchify")(images)
        h = fnn.LayerNorm(epsilon=1e-6, name="patch_ln")(h)
        h = NextBlock(DIM, name="next")(h)
        h = MBConv(OUT, name="mbconv")(h, train)
        pooled = jax.nn.relu(h).mean(axis=(1, 2))
        pooled = quantized(pooled)
        return fnn.Dense(CLASSES, name="logits")(pooled)


def right():
    x, y = make_batch()
    net = ImageModel()
    variables = net.init(jax.random.PRNGKey(0), jnp.zeros((1, 16, 16, 3)))
    stats = variables["batch_stats"]

    def loss_fn(params, x, y):
        images = jnp.moveaxis(x, 1, -1)
        logits, _ = net.apply({"params": params, "batch_stats": stats}, images, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    tx = optax.chain(
        optax.add_decayed_weights(1e-2),
        optax.rmsprop(2e-3, decay=0.9, eps=1e-3, momentum=0.9, eps_in_sqrt=False),
    )
    return stablenum_jax.program(loss_fn, variables["params"], x, y, optimizer=tx)
