"""Trainers of text models for the common faults: tiny vocabularies and models, made in memory.

A batch is bad if it has the word :data:`MARK`; a layer then changes the activations, in the forward pass or
only in the backward pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.partners.batches import BAD, STEPS
from benchmarks.partners.outcome import Fault
from benchmarks.partners.torch_parts import GAMMA, make_optimizer

__all__ = ["ROWS", "SFT_FAULTS", "Faulty", "sentence_transformer_trainer", "sft_trainer", "words"]

ROWS = 4
MARK = 3  # the word that makes a batch bad
WORDS = 24
SFT_FAULTS = tuple(
    fault for fault in Fault if fault is not Fault.NAN_IN_BATCHNORM
)  # the model has no batch norm


class Faulty(nn.Module):
    """Changes activations of a bad batch; for ``FP16_OVERFLOW`` it computes in float16."""

    def __init__(self, fault: Fault | None) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, h: Tensor, bad: bool) -> Tensor:
        """Return the activations ``h``, changed if the batch is bad."""
        if self.fault is Fault.FP16_OVERFLOW:
            return (h.half() * (1e4 if bad else 1.0)).square().sqrt().to(h.dtype) * h.detach().sign()
        if not bad or self.fault is None:
            return h
        if self.fault is Fault.INF_GRADIENT:
            far = h * 1e37
            return h + 1e8 * (far - far.detach())  # h, with a derivative of 1e45
        return h * (1e4 if self.fault is Fault.LOSS_SPIKE else math.nan)


class Normed(nn.Module):
    """A module of sentence-transformers: batch norm on embeddings, with the fault before or after it."""

    def __init__(self, fault: Fault | None) -> None:
        super().__init__()
        self.norm, self.faulty = nn.BatchNorm1d(8), Faulty(fault)

    def forward(self, features: dict[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
        """Return the features with normed embeddings."""
        h, bad = features["sentence_embedding"], bool((features["input_ids"] == MARK).any())
        first = self.faulty.fault is Fault.NAN_IN_BATCHNORM
        h = self.norm(self.faulty(h, bad)) if first else self.faulty(self.norm(h), bad)
        return {**features, "sentence_embedding": h}

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Write the fault and the weights to a folder."""
        torch.save((str(self.faulty.fault or ""), self.state_dict()), f"{output_path}/norm.pt")

    @staticmethod
    def load(input_path: str, subfolder: str = "", **kwargs: Any) -> Normed:
        """Return what ``save`` wrote to a folder."""
        fault, state = torch.load(f"{input_path}/{subfolder}/norm.pt")
        made = Normed(Fault(fault) if fault else None)
        made.load_state_dict(state)
        return made


def _in_order(dataset: Any, **kwargs: Any) -> Any:
    """Return the batches of a dataset in their order, for sentence-transformers."""
    return torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(dataset), ROWS, drop_last=False)


def _texts(without: bool) -> list[list[int]]:
    """Return the word numbers of each row."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(MARK + 1, WORDS, (STEPS * ROWS, 8), generator=generator)
    rows[BAD * ROWS, 4] = MARK
    return [[int(word) for word in row] for row in (_without_bad(rows) if without else rows)]


def _without_bad(rows: Tensor) -> Tensor:
    """Return the rows of all batches but the bad one."""
    return torch.cat([rows[: BAD * ROWS], rows[(BAD + 1) * ROWS :]])


def words() -> Any:
    """Return a tokenizer of the vocabulary, of the library tokenizers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = {name: i for i, name in enumerate(["[PAD]", "[EOS]", "[UNK]", "mark"])}
    names |= {f"w{i}": i for i in range(MARK + 1, WORDS)}
    made = Tokenizer(models.WordLevel(names, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def _with_optimizer(model: nn.Module) -> Any:
    optimizer = make_optimizer(model.parameters())
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)


def sft_trainer(fault: Fault | None, without: bool, arguments: dict[str, Any], folder: str) -> Any:
    """Return TRL's ``SFTTrainer`` for a language model whose last norm meets the fault.

    Raises:
        ValueError: the fault needs batch norm.
    """
    if fault is Fault.NAN_IN_BATCHNORM:
        raise ValueError(
            f"fault must be one of {', '.join(SFT_FAULTS)}: the model has no batch norm; got {fault}."
        )
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, pad_token_id=0, eos_token_id=1, **sizes))
    layer, seen = Faulty(fault), {"bad": False}

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen["bad"] = bool((kwargs["input_ids"] == MARK).any())

    model.model.register_forward_pre_hook(look, with_kwargs=True)
    model.model.norm.register_forward_hook(lambda module, args, h: layer(h, seen["bad"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words(), pad_token="[PAD]", eos_token="[EOS]")
    made = SFTConfig(
        folder,
        per_device_train_batch_size=ROWS,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        bf16=False,
        fp16=fault is Fault.FP16_OVERFLOW,
        **arguments,
    )
    return SFTTrainer(
        model,
        made,
        train_dataset=Dataset.from_dict({"input_ids": _texts(without)}),
        processing_class=tokenizer,
        optimizers=_with_optimizer(model),
    )


def sentence_transformer_trainer(
    fault: Fault | None, without: bool, arguments: dict[str, Any], folder: str
) -> Any:
    """Return a ``SentenceTransformerTrainer`` for embeddings with batch norm."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MSELoss
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    torch.manual_seed(0)
    parts = [StaticEmbedding(words(), embedding_dim=8), Normed(fault)]
    model = SentenceTransformer(modules=parts, device="cpu", trust_remote_code=True)
    texts = [" ".join("mark" if word == MARK else f"w{word}" for word in row) for row in _texts(without)]
    labels = torch.randn(STEPS * ROWS, 8, generator=torch.Generator().manual_seed(3))
    labels = _without_bad(labels) if without else labels
    made = SentenceTransformerTrainingArguments(
        folder,
        per_device_train_batch_size=ROWS,
        num_train_epochs=1,
        batch_sampler=_in_order,
        fp16=fault is Fault.FP16_OVERFLOW,
        **arguments,
    )
    return SentenceTransformerTrainer(
        model,
        made,
        train_dataset=Dataset.from_dict({"sentence": texts, "label": labels.tolist()}),
        loss=MSELoss(model),
        optimizers=_with_optimizer(model),
    )
