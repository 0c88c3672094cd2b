"""The port of layer_norm_epsilon.py mended, with an optimizer on both sides: the two programs agree.

``python mended_port.py`` then trains both for 200 steps from the same weights on the same batches.
"""

import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx
from layer_norm_epsilon import WIDTH, Block, Port, x, y
from torch import nn

import stablenum_jax
import stablenum_torch

STEPS = 200


class Mended(Port):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm1 = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)


def original():
    torch.manual_seed(0)
    model = Block()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def torch_loss(model, x, y):
    return nn.functional.mse_loss(model(x), y)


def port():
    return Mended(nnx.Rngs(0)), optax.adamw(1e-3, weight_decay=1e-2)


def jax_loss(model, x, y):
    return jnp.square(model(x) - y).mean()


def left():
    model, optimizer = original()
    batch = torch.tensor(x), torch.tensor(y)
    return stablenum_torch.program(torch_loss, model, *batch, model=model, optimizer=optimizer)


def right():
    model, optimizer = port()
    return stablenum_jax.program(jax_loss, model, x, y, optimizer=optimizer)


def carry_over(model, port):
    """Give the port the weights of the original."""

    def take(parameter, array, shape):
        parameter.set_value(jnp.asarray(array.detach().numpy().T.reshape(shape)))

    theirs, ours = model.attention, port.attention
    split = ours.query.kernel.shape
    weights, biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
    for layer, weight, bias in zip((ours.query, ours.key, ours.value), weights, biases, strict=True):
        take(layer.kernel, weight, split)
        take(layer.bias, bias, split[1:])
    for layer, linear in ((ours.out, theirs.out_proj), (port.up, model.mlp[0]), (port.down, model.mlp[2])):
        take(layer.kernel, linear.weight, layer.kernel.shape)
        take(layer.bias, linear.bias, layer.bias.shape)


def batches():
    rng = np.random.default_rng(1)
    for _ in range(STEPS):
        batch = rng.normal(size=x.shape).astype(np.float32)
        yield batch, np.roll(batch, -1, axis=1)


def torch_losses(model, optimizer):
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = torch_loss(model, torch.tensor(inputs), torch.tensor(targets))
        loss.backward()
        optimizer.step()
        yield loss.item()


def jax_losses(model, transformation):
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, inputs, targets):
        loss, gradients = nnx.value_and_grad(jax_loss)(model, inputs, targets)
        optimizer.update(model, gradients)
        return loss

    for inputs, targets in batches():
        yield float(step(model, optimizer, inputs, targets))


def main():
    model, optimizer = original()
    ported, transformation = port()
    carry_over(model, ported)
    losses = zip(torch_losses(model, optimizer), jax_losses(ported, transformation), strict=True)
    for number, (a, b) in enumerate(losses, 1):
        if number in (1, 10, 50, 100, STEPS):
            print(f"step {number:>3}   torch {a:.6f}   flax {b:.6f}   apart {abs(a - b) / a:.0e}")


if __name__ == "__main__":
    main()
