"""T5: the class of transformers with accumulation over micro-batches, and a rewritten model of torch.nn layers."""

import math
import sys
import types

# transformers 4.46.3: its pin of tokenizers and its import of torchvision are not needed here
_checks = types.ModuleType("transformers.dependency_versions_check")
_checks.dep_version_check = lambda *a, **k: None
sys.modules.setdefault(_checks.__name__, _checks)
import transformers.utils.import_utils as _import_utils  # noqa: E402

_import_utils._torchvision_available = False

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from transformers import T5Config, T5ForConditionalGeneration  # noqa: E402

import stablenum_torch  # noqa: E402

VOCAB, DIM, HEADS, HEAD_DIM, FF, LAYERS = 32, 16, 2, 6, 20, 2
BUCKETS, MAX_DISTANCE = 8, 12
LR, DECAY, MICRO = 2e-3, 0.1, 2


def make_batch():
    rng = np.random.default_rng(17)
    source, labels = np.zeros((4, 10), np.int64), np.full((4, 7), -100)
    for i, (n, m) in enumerate(((10, 7), (6, 6), (8, 3), (9, 4))):
        source[i, : n - 1], source[i, n - 1] = rng.integers(2, VOCAB, n - 1), 1
        labels[i, : m - 1], labels[i, m - 1] = rng.integers(2, VOCAB, m - 1), 1
    return torch.from_numpy(source), torch.from_numpy(labels)


# ---------------------------------------------------------------- the original


def build_original():
    config = T5Config(
        vocab_size=VOCAB,
        d_model=DIM,
        d_kv=HEAD_DIM,
        d_ff=FF,
        num_layers=LAYERS,
        num_heads=HEADS,
        relative_attention_num_buckets=BUCKETS,
        relative_attention_max_distance=MAX_DISTANCE,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def accumulated_loss(model, source, labels):
    """Sums over the micro-batches, divided by all target tokens of the step."""
    num_items = (labels != -100).sum()
    total = 0.0
    for ids, target in zip(source.split(MICRO), labels.split(MICRO)):
        decoder_ids = model.prepare_decoder_input_ids_from_labels(target)
        logits = model(
            input_ids=ids, attention_mask=(ids != 0).long(), decoder_input_ids=decoder_ids
        ).logits
        ce = F.cross_entropy(logits.view(-1, VOCAB), target.view(-1), ignore_index=-100, reduction="sum")
        total = total + ce / num_items
    return total


# ---------------------------------------------------------------- rewritten


class RelativeBias(nn.Module):
    def __init__(self, bidirectional=True):
        super().__init__()
        self.bidirectional = bidirectional
        self.table = nn.Embedding(BUCKETS, HEADS)

    def buckets(self, n_query, n_key):
        offset = torch.arange(n_key)[None, :] - torch.arange(n_query)[:, None]
        if self.bidirectional:
            half = BUCKETS // 2
            base, distance = half * (offset > 0), offset.abs()
        else:
            half = BUCKETS
            base, distance = 0, (-offset).clamp(min=0)
        exact = half // 2
        log_ratio = torch.log(distance.clamp(min=1) / exact) / math.log(MAX_DISTANCE / exact)
        far = (exact + (log_ratio * (half - exact)).long()).clamp(max=half - 1)
        return base + torch.where(distance < exact, distance, far)

    def forward(self, n_query, n_key):
        bias = self.table(self.buckets(n_query, n_key))
        return bias.permute(2, 0, 1).unsqueeze(0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.wk = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.wv = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)

    def forward(self, x, memory, bias):
        q, k, v = (
            w(y).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
            for w, y in ((self.wq, x), (self.wk, memory), (self.wv, memory))
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return self.wo(out.transpose(1, 2).flatten(2))


class GatedFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, FF, bias=False)
        self.up = nn.Linear(DIM, FF, bias=False)
        self.down = nn.Linear(FF, DIM, bias=False)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, cross):
        super().__init__()
        self.norm1, self.self_attention = nn.RMSNorm(DIM, eps=1e-6), Attention()
        if cross:
            self.norm2, self.cross_attention = nn.RMSNorm(DIM, eps=1e-6), Attention()
        self.norm3, self.ff = nn.RMSNorm(DIM, eps=1e-6), GatedFeedForward()

    def forward(self, x, bias, memory=None, memory_bias=None):
        y = self.norm1(x)
        x = x + self.self_attention(y, y, bias)
        if memory is not None:
            x = x + self.cross_attention(self.norm2(x), memory, memory_bias)
        return x + self.ff(self.norm3(x))


class Stack(nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.position = RelativeBias(bidirectional=not decoder)
        self.layers = nn.ModuleList([Layer(cross=decoder) for _ in range(LAYERS)])
        self.final_norm = nn.RMSNorm(DIM, eps=1e-6)

    def forward(self, x, mask, memory=None, memory_mask=None):
        bias = self.position(x.shape[1], x.shape[1]) + mask
        for layer in self.layers:
            x = layer(x, bias, memory, memory_mask)
        return self.final_norm(x)


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.encoder, self.decoder = Stack(decoder=False), Stack(decoder=True)

    def forward(self, source, labels):
        lowest = torch.finfo(self.embed.weight.dtype).min
        keys = torch.zeros(source.shape, dtype=self.embed.weight.dtype)
        keys = keys.masked_fill(source == 0, lowest)[:, None, None, :]
        memory = self.encoder(self.embed(source), keys)

        previous = F.pad(labels, (1, -1), value=0)
        previous = previous.masked_fill(previous == -100, 0)
        n = previous.shape[1]
        causal = torch.full((n, n), lowest, dtype=keys.dtype).triu(1)
        x = self.decoder(self.embed(previous), causal, memory, keys)
        return (x * DIM**-0.5) @ self.embed.weight.t()


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = build_original()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)

    def loss_fn(source, labels):
        return accumulated_loss(model, source, labels)

    return stablenum_torch.program(loss_fn, *make_batch(), model=model, optimizer=optimizer)


def right():
    torch.manual_seed(1)
    net = T5()
    opt = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=DECAY, foreach=False)

    def loss_fn(source, labels):
        logits = net(source, labels)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    return stablenum_torch.program(loss_fn, *make_batch(), model=net, optimizer=opt)
