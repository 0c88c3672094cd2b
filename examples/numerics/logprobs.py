"""The log-probabilities of a trainer beside those of an inference engine, which can only dump arrays.

``python logprobs.py [FAULT]`` writes engine.npz; ``stablenum diff engine.npz logprobs.py`` compares.
"""

import sys

import numpy as np
import torch

import stablenum_torch

LENGTH, WIDTH, HEADS, TOKENS, TEMPERATURE = 10, 16, 2, 24, 0.7
DRAWS = np.random.default_rng(0)
SHAPES = {"embedding": (TOKENS, WIDTH), "head": (TOKENS, WIDTH)}
for layer in range(2):
    SHAPES |= {f"{layer}.qkv": (3 * WIDTH, WIDTH), f"{layer}.out": (WIDTH, WIDTH)}
WEIGHTS = {n: (DRAWS.normal(size=s) / 2).astype(np.float32) for n, s in SHAPES.items()}
PROMPT = DRAWS.integers(TOKENS, size=LENGTH)


def quantised(w):
    """8-bit weights with one scale for each row, as both sides are meant to use them."""
    scale = abs(w).max(-1, keepdims=True) / 127
    return (np.round(w / scale) * scale).astype(np.float32)


# --- the trainer -------------------------------------------------------------------------------


def rotated(x, base=10000.0):
    half = x.shape[-1] // 2
    angles = torch.arange(LENGTH)[:, None] * base ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    turned = (a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos())
    return torch.cat(turned, -1)


def logprobs(weights, prompt):
    x = weights["embedding"][prompt]
    for layer in range(2):
        qkv = (x @ weights[f"{layer}.qkv"].T).view(LENGTH, 3, HEADS, -1).permute(1, 2, 0, 3)
        q, k, v = rotated(qkv[0]), rotated(qkv[1]), qkv[2]
        scores = (q @ k.mT) * (WIDTH // HEADS) ** -0.5
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(LENGTH, WIDTH)
        x = x + mixed @ weights[f"{layer}.out"].T
    logits = x @ weights["head"].T
    return torch.log_softmax(logits / TEMPERATURE, -1)


def program():
    weights = {name: torch.tensor(quantised(w)) for name, w in WEIGHTS.items()}
    return stablenum_torch.program(lambda p: logprobs(weights, p), torch.tensor(PROMPT))


# --- the engine, in NumPy ----------------------------------------------------------------------


def engine(fault=""):
    """What an engine computes and dumps: one array for each place that both sides have."""
    weights = {n: w if (fault, n) == ("layer", "1.out") else quantised(w) for n, w in WEIGHTS.items()}
    base = 10000.0 * (1 + 1e-4 * (fault == "rope"))
    temperature = np.float32(TEMPERATURE * (1.001 if fault == "temperature" else 1))
    half = WIDTH // HEADS // 2
    angles = np.arange(LENGTH)[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    arrays, x = {}, weights["embedding"][PROMPT]
    for layer in range(2):
        qkv = (x @ weights[f"{layer}.qkv"].T).reshape(LENGTH, 3, HEADS, -1).transpose(1, 2, 0, 3)
        q, k = (
            np.concatenate(
                [a[..., :half] * cos - a[..., half:] * sin, a[..., :half] * sin + a[..., half:] * cos], -1
            )
            for a in qkv[:2]
        )
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(np.float32(WIDTH // HEADS))
        scores = np.where(np.tri(LENGTH, dtype=bool), scores, -np.inf)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        mixed = (weight @ qkv[2]).swapaxes(0, 1).reshape(LENGTH, WIDTH)
        x = x + mixed @ weights[f"{layer}.out"].T
        arrays |= {f"{layer}.queries": q, f"{layer}.mixed": mixed, f"{layer}.stream": x}
    logits = x @ weights["head"].T
    scaled = logits if fault == "raw" else logits / temperature
    shifted = scaled - scaled.max(-1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return arrays | {"logits": logits, "logprobs": logp}


if __name__ == "__main__":
    np.savez("engine.npz", **engine(*sys.argv[1:]))  # all that an engine has to do
