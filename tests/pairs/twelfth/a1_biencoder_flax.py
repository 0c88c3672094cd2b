"""Dense retrieval: RoBERTa bi-encoder of transformers (torch) and its flax class, in-batch negatives, focal weights."""

import sys
import types

# transformers 4.46.3: its pin of tokenizers and its import of torchvision are not needed here
_checks = types.ModuleType("transformers.dependency_versions_check")
_checks.dep_version_check = lambda *a, **k: None
sys.modules.setdefault(_checks.__name__, _checks)
import transformers.utils.import_utils as _import_utils  # noqa: E402

_import_utils._torchvision_available = False

import flax.linen as linen  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from flax import traverse_util  # noqa: E402
from transformers import FlaxRobertaModel, RobertaConfig, RobertaModel  # noqa: E402

import stablenum_jax  # noqa: E402
import stablenum_torch  # noqa: E402

SIZES = dict(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=20,
    type_vocab_size=1,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
EMBED, SCALE, GAMMA = 12, 10.0, 2.0
LR, WARMUP, DECAY = 5e-3, 10, 0.1


def make_batch():
    rng = np.random.default_rng(3)

    def texts(lengths):
        ids = np.ones((len(lengths), 9), np.int64)  # 1 is <pad>
        for row, n in zip(ids, lengths):
            row[0], row[n - 1] = 0, 2
            row[1 : n - 1] = rng.integers(3, 40, n - 2)
        return ids

    return texts([5, 7, 4, 6]), texts([9, 6, 8, 7])


# ---------------------------------------------------------------- PyTorch


class BiEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        config = RobertaConfig(**SIZES, layer_norm_eps=1e-5)
        self.roberta = RobertaModel(config, add_pooling_layer=False)
        self.dense = nn.Linear(config.hidden_size, EMBED)

    def forward(self, input_ids):
        attention_mask = (input_ids != 1).long()
        out = self.roberta(input_ids=input_ids, attention_mask=attention_mask)
        m = attention_mask.unsqueeze(-1).to(out.last_hidden_state.dtype)
        pooled = (out.last_hidden_state * m).sum(1) / m.sum(1).clamp(min=1e-9)
        return F.normalize(torch.tanh(self.dense(pooled)), dim=-1)


class FocalMultipleNegatives(nn.Module):
    """Symmetric in-batch softmax; pairs that are ranked well already count less."""

    def forward(self, a, b):
        similarity = SCALE * a @ b.t()
        labels = torch.arange(len(a))
        return 0.5 * (self.one_way(similarity, labels) + self.one_way(similarity.t(), labels))

    def one_way(self, scores, labels):
        nll = F.cross_entropy(scores, labels, reduction="none")
        focus = (1 - torch.exp(-nll.detach())) ** GAMMA
        return (focus * nll).mean()


def make_adamw(model):
    no_decay = ("bias", "LayerNorm.weight")
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if not n.endswith(no_decay)],
            "weight_decay": DECAY,
        },
        {
            "params": [p for n, p in model.named_parameters() if n.endswith(no_decay)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / WARMUP))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


# ---------------------------------------------------------------- JAX


def build_flax():
    config = RobertaConfig(layer_norm_eps=1e-5, **SIZES)
    encoder = FlaxRobertaModel(
        config, input_shape=(1, 9), seed=7, dtype=jnp.float32, add_pooling_layer=False
    )
    projection = linen.Dense(EMBED)
    params = {
        "encoder": encoder.params,
        "projection": projection.init(jax.random.key(1), jnp.zeros((1, config.hidden_size)))["params"],
    }
    return encoder, projection, params


def masked_mean(hidden, mask):
    weights = mask[..., None].astype(hidden.dtype)
    return jnp.sum(hidden * weights, axis=1) / jnp.sum(weights, axis=1)


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def focal(log_probs):
    log_p = jnp.diagonal(log_probs)
    focus = (1.0 - jax.lax.stop_gradient(jnp.exp(log_p))) ** GAMMA
    return -jnp.mean(focus * log_p)


def contrastive_loss(queries, passages):
    logits = SCALE * jnp.einsum("qd,pd->qp", queries, passages)
    forward = focal(jax.nn.log_softmax(logits, axis=1))
    backward = focal(jax.nn.log_softmax(logits, axis=0))
    return (forward + backward) / 2


def decay_mask(params):
    flat = traverse_util.flatten_dict(params)
    return traverse_util.unflatten_dict({k: k[-1] not in ("bias", "scale") for k in flat})


def make_tx():
    schedule = optax.linear_schedule(LR / WARMUP, LR, WARMUP - 1)
    return optax.adamw(schedule, weight_decay=DECAY, mask=decay_mask)


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = BiEncoder()
    criterion = FocalMultipleNegatives()
    queries, passages = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(queries, passages):
        return criterion(model(queries), model(passages))

    return stablenum_torch.program(
        loss_fn, queries, passages, model=model, optimizer=make_adamw(model)
    )


def right():
    encoder, projection, params = build_flax()
    queries, passages = (jnp.asarray(a, jnp.int32) for a in make_batch())

    def loss_fn(params, queries, passages):
        ids = jnp.concatenate([queries, passages])  # one pass for both
        mask = (ids != 1).astype(jnp.int32)
        out = encoder(ids, attention_mask=mask, params=params["encoder"], train=False)
        pooled = masked_mean(out.last_hidden_state, mask)
        vectors = unit(jnp.tanh(projection.apply({"params": params["projection"]}, pooled)))
        return contrastive_loss(*jnp.split(vectors, 2))

    return stablenum_jax.program(loss_fn, params, queries, passages, optimizer=make_tx())
