"""Small residual ConvNet with BatchNorm and pooling, trained with clipped Nesterov SGD. PyTorch original and linen port."""
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import stablenum_jax
import stablenum_torch
import torch
import torch.nn as nn
import torch.nn.functional as F

CLASSES, MAX_NORM, LR, MOMENTUM, DECAY = 6, 0.25, 0.1, 0.9, 5e-4


def make_batch():
    rng = np.random.default_rng(21)
    images = rng.normal(0.2, 1.0, size=(6, 3, 16, 16)).astype(np.float32)
    labels = rng.integers(0, CLASSES, size=6)
    return images, labels


# ---------------------------------------------------------------- PyTorch


class ConvBN(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(cout)

    def forward(self, x):
        return self.bn(self.conv(x))


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.a = ConvBN(channels, channels)
        self.b = ConvBN(channels, channels)

    def forward(self, x):
        y = F.relu(self.a(x))
        y = self.b(y)
        return F.relu(x + y)


class SmallResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = ConvBN(3, 8, stride=2)
        self.stage1 = Residual(8)
        self.grow = ConvBN(8, 12)
        self.stage2 = Residual(12)
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, images):
        x = torch.relu(self.stem(images))
        x = self.stage1(x)
        x = F.avg_pool2d(x, kernel_size=3, stride=2, padding=1)
        x = F.leaky_relu(self.grow(x), 0.1)
        x = self.stage2(x)
        x = F.max_pool2d(x, kernel_size=2)
        features = x.mean(dim=(2, 3))
        return self.fc(features)


class ClippedSGD(torch.optim.SGD):
    """SGD that clips the global gradient norm before the step."""

    def __init__(self, params, max_norm, **kwargs):
        super().__init__(params, **kwargs)
        self.max_norm = max_norm

    def step(self, closure=None):
        everything = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(everything, self.max_norm)
        return super().step(closure)


def left():
    torch.manual_seed(1)
    model = SmallResNet().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    images, labels = make_batch()

    def loss_fn(images, labels):
        return F.cross_entropy(model(images), labels)

    optimizer = ClippedSGD(
        model.parameters(), max_norm=MAX_NORM, lr=LR, momentum=MOMENTUM, nesterov=True, weight_decay=DECAY
    )
    return stablenum_torch.program(
        loss_fn, torch.from_numpy(images), torch.from_numpy(labels), model=model, optimizer=optimizer
    )


# ---------------------------------------------------------------- Flax


class FlaxConvBN(linen.Module):
    features: int
    stride: int = 1

    @linen.compact
    def __call__(self, x, train):
        conv = linen.Conv(self.features, (3, 3), strides=self.stride, padding=1, use_bias=False, name="conv")
        y = conv(x)
        bn = linen.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5, name="bn")
        return bn(y)


class FlaxResidual(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        channels = x.shape[-1]
        y = linen.relu(FlaxConvBN(channels, name="a")(x, train))
        y = FlaxConvBN(channels, name="b")(y, train)
        return linen.relu(x + y)


class FlaxSmallResNet(linen.Module):
    @linen.compact
    def __call__(self, images, train=True):
        x = jnp.transpose(images, (0, 2, 3, 1))
        x = FlaxConvBN(8, stride=2, name="stem")(x, train)
        x = linen.relu(x)
        x = FlaxResidual(name="stage1")(x, train)
        x = linen.avg_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        x = FlaxConvBN(12, name="grow")(x, train)
        x = linen.leaky_relu(x, negative_slope=0.1)
        x = FlaxResidual(name="stage2")(x, train)
        x = linen.max_pool(x, (2, 2), strides=(2, 2))
        pooled = jnp.mean(x, axis=(1, 2))
        return linen.Dense(CLASSES, name="fc")(pooled)


def clip_global_norm(max_norm, eps=1e-6):
    def init(params):
        return optax.EmptyState()

    def update(updates, state, params=None):
        norm = optax.global_norm(updates)
        factor = jnp.minimum(1.0, max_norm / (norm + eps))
        return jax.tree.map(lambda g: g * factor, updates), state

    return optax.GradientTransformation(init, update)


def make_optimizer():
    return optax.chain(
        clip_global_norm(MAX_NORM),
        optax.add_decayed_weights(DECAY),
        optax.sgd(LR, momentum=MOMENTUM, nesterov=True),
    )


def right():
    images, labels = make_batch()
    net = FlaxSmallResNet()
    variables = net.init(jax.random.key(5), images)
    stats = variables["batch_stats"]
    leaves, treedef = jax.tree.flatten(variables["params"])
    keys = jax.random.split(jax.random.key(6), len(leaves))
    params = treedef.unflatten([p + 0.05 * jax.random.normal(k, p.shape) for p, k in zip(leaves, keys)])

    def loss_fn(params, images, labels):
        logits, _ = net.apply({"params": params, "batch_stats": stats}, images, train=True, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return stablenum_jax.program(
        loss_fn, params, jnp.asarray(images), jnp.asarray(labels), optimizer=make_optimizer()
    )
