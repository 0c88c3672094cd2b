"""Speech recognition: spectrogram front end, a small Conformer and CTC; torch.nn and flax.nnx with optax.ctc_loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.signal
import torch
import torch.nn as nn
import torch.nn.functional as F
from flax import nnx

import stablenum_jax
import stablenum_torch

N_FFT, HOP, MELS, LOG_FLOOR = 32, 16, 12, 1e-5
DIM, HEADS, FF, KERNEL, BLOCKS, VOCAB = 16, 4, 24, 5, 2, 8
LR, MOMENTUM, CLIP = 0.02, 0.9, 0.5


def mel_bank():
    """Triangles over the bins, narrow ones first."""
    edges = (N_FFT // 2) * (np.linspace(0, 1, MELS + 2) ** 1.5)
    bins = np.arange(N_FFT // 2 + 1)[:, None]
    up = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    down = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return np.maximum(0, np.minimum(up, down)).astype(np.float32) + np.float32(1e-3)


def make_batch():
    rng = np.random.default_rng(8)
    frames = np.array([20, 17, 13])
    t = np.arange(N_FFT + HOP * 19)
    speech = np.stack([np.sin(t * f) + 0.5 * np.sin(t * t * f / 400) for f in (0.4, 0.9, 1.7)])
    speech = speech + 0.3 * rng.normal(size=speech.shape)
    speech = speech * (t < (N_FFT + HOP * (frames[:, None] - 1)))
    labels = np.array([[3, 5, 5, 1], [2, 7, 4, 0], [6, 1, 0, 0]])
    label_lengths = np.array([4, 3, 2])
    return speech.astype(np.float32), frames, labels, label_lengths


# ---------------------------------------------------------------- PyTorch


class LogMel(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(N_FFT))
        self.register_buffer("bank", torch.from_numpy(mel_bank()))

    def forward(self, wave):
        spec = torch.stft(
            wave, N_FFT, hop_length=HOP, window=self.window, center=False, return_complex=True
        )
        power = spec.real**2 + spec.imag**2
        return torch.log(self.bank.t() @ power + LOG_FLOOR)  # (batch, mels, frames)


class FeedForward(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LayerNorm(DIM), nn.Linear(DIM, FF), nn.SiLU(), nn.Linear(FF, DIM))


class ConvModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.expand = nn.Conv1d(DIM, 2 * DIM, 1)
        self.depthwise = nn.Conv1d(DIM, DIM, KERNEL, padding=KERNEL // 2, groups=DIM)
        self.inner_norm = nn.LayerNorm(DIM)
        self.project = nn.Conv1d(DIM, DIM, 1)

    def forward(self, x, pad):
        x = F.glu(self.expand(self.norm(x).transpose(1, 2)), dim=1)
        x = self.depthwise(x.masked_fill(pad.unsqueeze(1), 0.0))
        x = F.silu(self.inner_norm(x.transpose(1, 2)))
        return self.project(x.transpose(1, 2)).transpose(1, 2)


class ConformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ff1 = FeedForward()
        self.attn_norm = nn.LayerNorm(DIM)
        self.attn = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.conv = ConvModule()
        self.ff2 = FeedForward()
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x, pad):
        x = x + 0.5 * self.ff1(x)
        y = self.attn_norm(x)
        x = x + self.attn(y, y, y, key_padding_mask=pad, need_weights=False)[0]
        x = x + self.conv(x, pad)
        x = x + 0.5 * self.ff2(x)
        return self.norm(x)


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = LogMel()
        self.subsample = nn.Conv1d(MELS, DIM, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList([ConformerBlock() for _ in range(BLOCKS)])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, wave, frames):
        x = F.relu(self.subsample(self.features(wave))).transpose(1, 2)
        steps = (frames + 1) // 2
        pad = torch.arange(x.shape[1]) >= steps.unsqueeze(1)
        for block in self.blocks:
            x = block(x, pad)
        return F.log_softmax(self.head(x), dim=-1), steps


def make_sgd(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True)

    def clip(*_):
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)

    optimizer.register_step_pre_hook(clip)
    return optimizer


# ---------------------------------------------------------------- JAX


def layer_norm(rngs):
    return nnx.LayerNorm(DIM, epsilon=1e-5, rngs=rngs)


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.norm = layer_norm(rngs)
        self.up = nnx.Linear(DIM, FF, rngs=rngs)
        self.down = nnx.Linear(FF, DIM, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.silu(self.up(self.norm(x))))


class Convolution(nnx.Module):
    def __init__(self, rngs):
        self.norm = layer_norm(rngs)
        self.pointwise_in = nnx.Linear(DIM, 2 * DIM, rngs=rngs)
        self.depthwise = nnx.Conv(DIM, DIM, (KERNEL,), feature_group_count=DIM, rngs=rngs)
        self.depthwise_norm = layer_norm(rngs)
        self.pointwise_out = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x, valid):
        value, gate = jnp.split(self.pointwise_in(self.norm(x)), 2, axis=-1)
        x = value * nnx.sigmoid(gate) * valid[..., None]
        x = nnx.silu(self.depthwise_norm(self.depthwise(x)))
        return self.pointwise_out(x)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.before = MLP(rngs)
        self.attention_norm = layer_norm(rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, DIM, decode=False, rngs=rngs)
        self.convolution = Convolution(rngs)
        self.after = MLP(rngs)
        self.final_norm = layer_norm(rngs)

    def __call__(self, x, valid):
        x = x + self.before(x) / 2
        x = x + self.attention(self.attention_norm(x), mask=valid[:, None, None, :])
        x = x + self.convolution(x, valid)
        x = x + self.after(x) / 2
        return self.final_norm(x)


class Conformer(nnx.Module):
    def __init__(self, rngs):
        self.reduce = nnx.Conv(MELS, DIM, (3,), strides=(2,), padding=((1, 1),), rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.classify = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, features, lengths):
        x = nnx.relu(self.reduce(features))
        valid = jnp.arange(x.shape[1]) < (lengths[:, None] + 1) // 2
        for block in self.blocks:
            x = block(x, valid)
        return self.classify(x), valid


def log_mel(wave):
    window = jnp.asarray(scipy.signal.windows.hann(N_FFT, sym=False), wave.dtype)
    starts = np.arange(0, wave.shape[1] - N_FFT + 1, HOP)
    framed = wave[:, starts[:, None] + np.arange(N_FFT)]
    spectrum = jnp.fft.rfft(framed * window)
    power = jnp.square(spectrum.real) + jnp.square(spectrum.imag)
    return jnp.log(power @ mel_bank() + LOG_FLOOR)  # (batch, frames, mels)


def clip_by_total_norm(limit):
    """optax.clip_by_global_norm with the 1e-6 of torch.nn.utils.clip_grad_norm_."""

    def clip(updates, params=None):
        shrink = jnp.minimum(1.0, limit / (optax.global_norm(updates) + 1e-6))
        return jax.tree.map(lambda g: g * shrink, updates)

    return optax.stateless(clip)


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = Recognizer()
    criterion = nn.CTCLoss(blank=0, reduction="mean", zero_infinity=True)
    wave, frames, labels, label_lengths = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(wave, frames, labels, label_lengths):
        log_probs, steps = model(wave, frames)
        return criterion(log_probs.transpose(0, 1), labels, steps, label_lengths)

    return stablenum_torch.program(
        loss_fn, wave, frames, labels, label_lengths, model=model, optimizer=make_sgd(model)
    )


def right():
    graphdef, params = nnx.split(Conformer(nnx.Rngs(4)), nnx.Param)
    wave, frames, labels, label_lengths = (jnp.asarray(a) for a in make_batch())

    def loss_fn(params, wave, frames, labels, label_lengths):
        logits, valid = nnx.merge(graphdef, params)(log_mel(wave), frames)
        unused = (jnp.arange(labels.shape[1]) >= label_lengths[:, None]).astype(logits.dtype)
        nll = optax.ctc_loss(logits, 1.0 - valid.astype(logits.dtype), labels, unused, blank_id=0)
        return jnp.mean(nll / label_lengths)

    tx = optax.chain(clip_by_total_norm(CLIP), optax.sgd(LR, momentum=MOMENTUM, nesterov=True))
    return stablenum_jax.program(
        loss_fn, params, wave, frames, labels, label_lengths, optimizer=tx
    )
