"""TRL's trainers with a guard: each fault leaves no trace."""

from __future__ import annotations

import math

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import DPOConfig, DPOTrainer

from benchmarks.partners.torch_hf import quiet
from benchmarks.partners.torch_parts import whole_state
from benchmarks.partners.torch_texts import SFT_FAULTS, words
from stablenum_torch.integrations.transformers import guard
from tests.partners.hugging_face import alone, check_guarded, check_same

# TRL uses old names of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.*` is deprecated:FutureWarning")


@pytest.mark.parametrize("fault", SFT_FAULTS)
def test_a_bad_batch_leaves_no_trace(fault):
    check_guarded("trl-sft", fault)


def test_trap_the_sft_trainer_alone_applies_the_bad_batch():
    verdict = alone("trl-sft", SFT_FAULTS[0])
    assert not verdict.finite
    assert not verdict.scheduler_held


def preferences(bad):
    """Three batches of two pairs, of which the second is bad or left out."""
    prompts = [f"w{4 + i} w{5 + i}" for i in range(6)]
    rows = [
        {"prompt": prompt, "chosen": f" w{8 + i} w9", "rejected": " mark w7" if i == 2 else f" w{9 + i} w7"}
        for i, prompt in enumerate(prompts)
    ]
    return Dataset.from_list(rows if bad else rows[:2] + rows[4:])


def dpo(folder, bad):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = LlamaConfig(vocab_size=24, pad_token_id=0, eos_token_id=1, **sizes)
    model, ref = LlamaForCausalLM(made), LlamaForCausalLM(made)
    ref.load_state_dict(model.state_dict())
    marked = {}

    def look(module, args, kwargs):
        marked["now"] = bool((kwargs["input_ids"] == 3).any())

    model.model.register_forward_pre_hook(look, with_kwargs=True)
    model.model.norm.register_forward_hook(lambda module, args, h: h * math.nan if marked["now"] else h)
    arguments = DPOConfig(
        str(folder),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        bf16=False,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        learning_rate=0.01,
        **{**quiet(), "save_strategy": "no"},
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words(), pad_token="[PAD]", eos_token="[EOS]")
    trainer = DPOTrainer(model, ref, arguments, train_dataset=preferences(bad), processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    return trainer


def test_preferences_are_guarded_too(tmp_path):
    ends = []
    for bad in (True, False):
        trainer = guard(dpo(tmp_path, bad))
        trainer.train()
        ends.append(whole_state(trainer.model, trainer.optimizer))
        applied = [row["guard/applied"] for row in trainer.state.log_history if "loss" in row]
        assert applied == ([1, 0, 1] if bad else [1, 1])
    check_same(*ends)
