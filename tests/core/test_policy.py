"""Precision policies: the grammar, compared with jmp's own parser, and rules for paths."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import jmp
import numpy as np
import pytest
import torch

from stablenum import Policy, PolicyRule
from stablenum.precision.policy import parse_format

SHORT = ("f16", "bf16", "f32", "full", "float16", "bfloat16", "float32")
WORDS = [
    *SHORT,
    *(f"c={a}" for a in SHORT),
    *(f"p={a},c={b}" for a, b in itertools.product(SHORT[:3], SHORT[:3])),
    *(f"params={a},compute={b},output={c}" for a, b, c in itertools.product(SHORT[:3], repeat=3)),
    "o=f16",
    "output=f32,params=bf16",
    "half",
    "p=f32,c=half",
]


@pytest.mark.parametrize("text", WORDS)
def test_the_grammar_equals_jmps(text: str) -> None:
    theirs, ours = jmp.get_policy(text), Policy.parse(text, half=jnp.dtype(jmp.half_dtype()).name)
    expected = (theirs.param_dtype, theirs.compute_dtype, theirs.output_dtype)
    assert (ours.params, ours.compute, ours.output) == tuple(jnp.dtype(d).name for d in expected)


def test_formats_are_known_by_any_name() -> None:
    named = ("bf16", "bfloat16", torch.bfloat16, jnp.bfloat16, jnp.dtype(jnp.bfloat16), "torch.bfloat16")
    assert {parse_format(name) for name in named} == {"bfloat16"}
    assert parse_format(np.float16) == parse_format("half") == parse_format("fp16") == "float16"
    assert parse_format("half", half="bfloat16") == "bfloat16"


def test_the_last_matching_rule_applies_for_each_part() -> None:
    policy = Policy.parse(
        "p=f32,c=bf16",
        rules={"*norm*": "float32", "head": "output=float32", "blocks.0": "c=f16", "*.norm2": "c=f64"},
    )
    compute = {
        path: policy.at(path).compute
        for path in ("", "blocks.1.mlp", "blocks.0.mlp", "blocks.1.norm1", "blocks.0.norm2", "a/LayerNorm_0")
    }
    assert compute == {
        "": "bfloat16",
        "blocks.1.mlp": "bfloat16",
        "blocks.0.mlp": "float16",
        "blocks.1.norm1": "float32",
        "blocks.0.norm2": "float64",
        "a/LayerNorm_0": "float32",
    }
    head = policy.at("head")
    assert (head.params, head.compute, head.output) == ("float32", "bfloat16", "float32")
    assert policy.at("blocks.1.norm1").output == "float32"


def test_a_part_with_its_own_formats_begins_at_the_model_and_where_a_rule_starts_to_match() -> None:
    rules = {"blocks.*": "f16", "*norm*": "p=f32", "blocks.1.mlp": "o=f32", "Head": "f32"}
    policy = Policy.parse("p=f32,c=bf16", rules=rules)
    paths = ["", "blocks", "blocks.0", "blocks.0.mlp", "blocks.0.norm1", "blocks.1.mlp", "blocks/1/mlp"]
    assert [path for path in [*paths, "head", "head.out", "norm"] if policy.begins_at(path)] == [
        "",
        "blocks.0",  # "blocks.*" matches what is inside, not blocks itself
        "blocks.1.mlp",
        "blocks/1/mlp",
        "head",
    ]


def test_eight_bits_are_for_compute_only() -> None:
    policy = Policy.parse("fp8")
    assert (policy.params, policy.compute, policy.output) == ("float32", "float8_e4m3fn", "bfloat16")
    assert (policy.carrier, policy.compute_format.max) == ("bfloat16", 448.0)
    for text in ("p=fp8", "o=e5m2", "params=e4m3,compute=bf16"):
        with pytest.raises(ValueError, match="at least 16 bits"):
            Policy.parse(text)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Policy.parse("q=f32"), "parts named params, compute or output"),
        (lambda: Policy.parse(""), "policy must be a string such as"),
        (lambda: Policy.parse("int8"), "format must be one of"),
        (lambda: Policy(rules=[3]), "rules must be PolicyRules, or pairs"),
        (lambda: Policy(rules={"": "f32"}), "the pattern of a rule must be a string that is not empty"),
        (lambda: Policy(rules={"*": "p=fp8"}), "at least 16 bits"),
    ],
)
def test_wrong_policy_strings_are_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_policy_survives_str_and_parse() -> None:
    policy = Policy.parse("p=f32,c=bf16,o=f32", rules=[PolicyRule("*norm*", compute="f32")])
    assert str(policy) == "p=f32,c=bf16,o=f32;*norm*:c=float32"
    assert Policy.parse(str(policy.at("mlp"))) == policy.at("mlp")
