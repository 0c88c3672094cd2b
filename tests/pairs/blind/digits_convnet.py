# Small digit classifier. The original is PyTorch (NCHW), the port is Flax linen (NHWC).
from functools import partial

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

import stablenum_jax
import stablenum_torch

CLASSES = 10
LEARNING_RATE = 0.05
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-3
WARMUP_STEPS = 10


def digits():
    rs = np.random.RandomState(3)
    pixels = rs.rand(6, 16, 16, 1).astype("float32") * 2 - 0.6
    target = rs.randint(0, CLASSES, size=6)
    return pixels, target


class ConvUnit(nn.Module):
    """conv 3x3 -> batch norm -> relu"""

    def __init__(self, c_in, c_out, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(c_out)
        self.act = nn.ReLU()
        nn.init.uniform_(self.bn.weight, 0.8, 1.2)
        nn.init.uniform_(self.bn.bias, -0.2, 0.2)

    def forward(self, x):
        y = self.conv(x)
        y = self.bn(y)
        return self.act(y)


class DigitNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = ConvUnit(1, 8)
        self.pool = nn.AvgPool2d(kernel_size=3, stride=2, padding=1, count_include_pad=False)
        self.down = ConvUnit(8, 16, stride=2)
        self.refine = ConvUnit(16, 16)
        self.max = nn.MaxPool2d(2)
        self.classifier = nn.Linear(16 * 2 * 2, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        x = self.pool(x)
        x = self.down(x)
        x = x + self.refine(x)
        x = self.max(x)
        x = x.permute(0, 2, 3, 1).flatten(1)
        return self.classifier(x)


def left():
    torch.manual_seed(21)
    net = DigitNet()
    net.train()
    criterion = nn.CrossEntropyLoss()

    def compute_loss(x, y):
        return criterion(net(x), y)

    sgd = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True)
    torch.optim.lr_scheduler.LinearLR(sgd, start_factor=0.1, total_iters=WARMUP_STEPS)

    pixels, target = digits()
    x = torch.tensor(pixels.transpose(0, 3, 1, 2).copy())
    y = torch.tensor(target)
    return stablenum_torch.program(compute_loss, x, y, model=net, optimizer=sgd)


# ----- port ------------------------------------------------------------------


def around_one(key, shape, dtype=jnp.float32):
    return jax.random.uniform(key, shape, dtype, 0.8, 1.2)


def around_zero(key, shape, dtype=jnp.float32):
    return jax.random.uniform(key, shape, dtype, -0.2, 0.2)


class ConvBnRelu(linen.Module):
    features: int
    stride: int = 1

    @linen.compact
    def __call__(self, x, train: bool):
        conv = linen.Conv(self.features, (3, 3), strides=self.stride, padding=1, use_bias=False, name="conv")
        norm = linen.BatchNorm(
            use_running_average=not train, momentum=0.9, epsilon=1e-5, name="bn",
            scale_init=around_one, bias_init=around_zero,
        )
        x = conv(x)
        x = norm(x)
        return linen.relu(x)


class DigitModel(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool = True):
        x = ConvBnRelu(8, name="stem")(x, train)
        x = linen.avg_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)), count_include_pad=False)
        x = ConvBnRelu(16, stride=2, name="down")(x, train)
        x = x + ConvBnRelu(16, name="refine")(x, train)
        x = linen.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        return linen.Dense(CLASSES, name="classifier", bias_init=around_zero)(x)


def cross_entropy(model, batch_stats, params, x, y):
    variables = {"params": params, "batch_stats": batch_stats}
    logits, _ = model.apply(variables, x, train=True, mutable=["batch_stats"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def warmup(count):
    progress = jnp.minimum(count * (1.0 / WARMUP_STEPS), 1.0)
    return LEARNING_RATE * (0.1 + 0.9 * progress)


def right():
    pixels, target = digits()
    x, y = jnp.asarray(pixels), jnp.asarray(target)
    model = DigitModel()
    variables = model.init(jax.random.PRNGKey(5), x)
    tx = optax.chain(
        optax.add_decayed_weights(WEIGHT_DECAY),
        optax.sgd(warmup, momentum=MOMENTUM, nesterov=True),
    )
    loss = partial(cross_entropy, model, variables["batch_stats"])
    return stablenum_jax.program(loss, variables["params"], x, y, optimizer=tx)
