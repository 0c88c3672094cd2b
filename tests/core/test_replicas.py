"""Checksums of bits, and what is concluded from those of several replicas."""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable

import array_api_compat.numpy
import array_api_compat.torch
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import stablenum
from stablenum.guard import replicas
from stablenum.guard.replicas import ABSENT, BLOCK, PARAMETER, Parted, odd_ones, parted_slots
from stablenum_jax._step import replicas as in_jax
from stablenum_torch._devices import checksums as in_torch
from stablenum_torch._devices.checksums import checksums
from tests.oracles import checksums as oracle

RNG = np.random.default_rng(11)


def in_core(words: np.ndarray, xp=array_api_compat.numpy) -> int:
    keys = replicas.key_of_places(BLOCK, xp=xp)
    rows = [words[i : i + BLOCK] for i in range(0, len(words), BLOCK)]
    sums = [replicas.block_sums(xp.asarray(row), keys, xp=xp) for row in rows]
    stacked = xp.stack(sums) if sums else xp.zeros(0, dtype=xp.int64)
    return int(replicas.checksum(stacked, replicas.key_of_places(len(rows), xp=xp, first=BLOCK), xp=xp))


def by_jax(words: np.ndarray) -> int:
    with jax.enable_x64(True):
        return int(jax.jit(in_jax._checksum)(jnp.asarray(words)))


def by_torch_elsewhere(words: np.ndarray) -> int:
    with pytest.MonkeyPatch.context() as patch:
        in_general = functools.partial(replicas.block_sums, xp=array_api_compat.torch)
        patch.setattr(in_torch, "_block_sums", in_general)
        return in_torch.checksums([torch.from_numpy(words)])[0]


WAYS: dict[str, Callable[[np.ndarray], int]] = {
    "core, NumPy": in_core,
    "core, torch": lambda words: in_core(words, array_api_compat.torch),
    "torch": lambda words: checksums([torch.from_numpy(words)])[0],
    "torch, as on an accelerator": by_torch_elsewhere,
    "jax": by_jax,
}


def random_words(n: int) -> np.ndarray:
    return RNG.integers(-(2**31), 2**31, n, dtype=np.int64).astype(np.int32)


@pytest.mark.parametrize("n", [1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 3, 5 * BLOCK])
def test_all_ways_agree_with_the_oracle(n):
    words = random_words(n)
    expected = oracle.checksum(words.tolist())
    assert {name: way(words) for name, way in WAYS.items()} == dict.fromkeys(WAYS, expected)


def test_the_keys_are_those_of_splitmix64():
    # The first outputs for seed 0, as published with the generator.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [oracle.splitmix64(n) for n in (1, 2, 3, 4)] == published
    keys = replicas.key_of_places(1000, xp=array_api_compat.numpy, first=5)
    assert [int(k) % 2**64 for k in keys] == [oracle.key(place) for place in range(5, 1005)]
    assert len(set(keys.tolist())) == 1000


@pytest.mark.parametrize("place", [0, 1, 4999, BLOCK - 1, BLOCK, BLOCK + 4999])
def test_each_bit_of_a_word_changes_the_checksum(place):
    words = random_words(BLOCK + 5000)
    before = in_core(words)
    seen = {before}
    for bit in range(32):
        words[place] ^= np.int32(-(2**31) if bit == 31 else 2**bit)
        seen.add(in_core(words))
        words[place] ^= np.int32(-(2**31) if bit == 31 else 2**bit)
    assert len(seen) == 33


def floats(*values: float) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.int32)


def many(n: int, value: float) -> np.ndarray:
    return np.full(n, value, np.float32).view(np.int32)


ALIKE = {
    "a sign": (floats(1.0, 2.0), floats(-1.0, 2.0)),
    "signs in a square": (floats(1.0, -1.0, -1.0, 1.0), floats(-1.0, 1.0, 1.0, -1.0)),
    "places of opposites": (floats(1.0, 3.0, -1.0), floats(-1.0, 3.0, 1.0)),
    "places in two blocks": (
        np.concatenate([floats(1.0), many(BLOCK - 1, 0.5), floats(2.0)]),
        np.concatenate([floats(2.0), many(BLOCK - 1, 0.5), floats(1.0)]),
    ),
    "signs of all zeros": (many(2**17, 0.0), many(2**17, -0.0)),
    "signs of two zeros": (floats(0.0, 0.0), floats(-0.0, -0.0)),
    "the lowest bits of two": (floats(1.0, 1.0), np.nextafter(np.float32([1, 1]), 2).view(np.int32)),
    "payloads of NaN": (np.int32([0x7FC00000]), np.int32([0x7FC00001])),
    "whole blocks": (
        np.concatenate([many(BLOCK, 1.0), many(BLOCK, 2.0)]),
        np.concatenate([many(BLOCK, 2.0), many(BLOCK, 1.0)]),
    ),
}


@pytest.mark.parametrize("way", list(WAYS.values()), ids=list(WAYS))
@pytest.mark.parametrize(("a", "b"), list(ALIKE.values()), ids=list(ALIKE))
def test_values_that_are_nearly_alike_have_other_checksums(way, a, b):
    assert way(a) != way(b)


def test_places_of_random_values_matter():
    words = random_words(64)
    seen = {in_core(words)}
    for i, j in itertools.combinations(range(64), 2):
        words[[i, j]] = words[[j, i]]
        seen.add(in_core(words))
        words[[i, j]] = words[[j, i]]
    assert len(seen) == 1 + 64 * 63 // 2


DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.uint8])
def test_bits_of_every_dtype_count_in_torch(dtype):
    tensor = torch.ones(3, 5).to(dtype)
    raw = tensor.view(torch.uint8).reshape(-1)
    seen = set(checksums([tensor]))
    for byte, bit in itertools.product(range(len(raw)), [0] if dtype == torch.bool else range(8)):
        raw[byte] ^= 2**bit
        seen.update(checksums([tensor]))
        raw[byte] ^= 2**bit
    bits = 15 if dtype == torch.bool else 15 * 8 * tensor.element_size()
    assert len(seen) == 1 + bits


JAX_DTYPES = ["float16", "bfloat16", "float8_e5m2", "complex64", "int8", "uint32", "int4", "bool"]


@pytest.mark.parametrize("dtype", JAX_DTYPES)
def test_every_element_of_every_dtype_counts_in_jax(dtype):
    ones = jnp.ones((3, 5), dtype)
    zeros = [ones.at[i, j].set(jnp.zeros((), dtype)) for i in range(3) for j in range(5)]
    with jax.enable_x64(True):
        one_by_one = jax.jit(in_jax._checksum)
        assert len({int(one_by_one(x)) for x in (ones, *zeros)}) == 16


def test_float64_of_jax_counts_in_full():
    with jax.enable_x64(True):
        a = jnp.asarray([1.0, 2.0])
        sums = {int(in_jax._checksum(x)) for x in (a, jnp.nextafter(a, 3.0), a.at[0].mul(-1.0))}
    assert len(sums) == 3


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_empty_tensors_and_scalars_have_a_checksum(shape):
    (found,) = checksums([torch.ones(shape)])
    assert found == (0 if 0 in shape else oracle.checksum(floats(1.0).tolist()))


def test_strides_and_lazy_signs_do_not_count():
    x = torch.randn(4, 6, dtype=torch.complex64)
    lazy = [x.t().contiguous().t(), x.conj().resolve_conj().conj()]
    assert set(checksums(lazy)) == set(checksums([x]))


def test_a_digest_is_that_of_all_tensors_with_their_names():
    tensors = {"parameter": "a 1", "state": "b 2"}
    others = [
        {"parameter": "a 1"},
        {"parameter": "b 2", "state": "a 1"},
        {"parameter": "a 1", "state": "b 3"},
        {"parameter": "a 1", "states": "b 2"},
        {},
    ]
    digests = {replicas.digest(each) for each in (tensors, *others)}
    assert len(digests) == 6
    assert all(ABSENT <= number < 2**63 for number in digests)
    # Other processes, with other seeds of hash(), must compute the same number.
    assert replicas.digest(tensors) == replicas.digest(dict(reversed(tensors.items()))) == DIGEST


DIGEST = -6594824761181479558


# --- when, and which -------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_check_is_due_after_every_so_many_steps(every):
    due = [steps for steps in range(1, 21) if replicas.check_due(every, steps)]
    assert due == list(range(every, 21, every))


@pytest.mark.parametrize("held", list(itertools.product([3, 4, 5], repeat=4)))
def test_the_odd_ones_are_those_outside_a_strict_majority(held):
    odd = odd_ones(dict(enumerate(held)))
    majority = [value for value in held if held.count(value) > len(held) / 2]
    if len(set(held)) == 1:
        assert odd == []
    elif majority:
        assert odd == [i for i, value in enumerate(held) if value != majority[0]]
    else:
        assert odd == [0, 1, 2, 3]


def test_one_replica_and_none_cannot_differ():
    assert odd_ones({}) == odd_ones({5: 1}) == []


@pytest.mark.parametrize(
    "values", [[ABSENT], [2**63 - 1], [ABSENT, 2**63 - 1], [0, -1], [5, 5, 5], [5, 5, 6]]
)
def test_slots_differ_if_the_digests_do(values):
    largest, inverted = max(values), max(~value for value in values)
    assert parted_slots([largest], [inverted]) == ([0] if len(set(values)) > 1 else [])


# --- what is said ----------------------------------------------------------------------------------


def error(*found: Parted, parameters: int = 1, compared: int = 9, step: int | None = 7):
    return replicas.parted_error(
        found, step=step, kind="rank", parameters=parameters, compared=compared, remedy="Use {good}."
    )


def test_the_message_names_step_rank_parameter_and_tensor():
    state = Parted("w", "state['exp_avg']", {0: "a", 1: "a", 2: "b", 3: "a"})
    made = error(Parted("w", PARAMETER, {0: "a", 1: "a", 2: "b", 3: "a"}), state)
    assert "parted after step 7: rank 2 differs from ranks 0, 1, 3 in w; " in str(made)
    assert "rank 2 differs from ranks 0, 1, 3 in state['exp_avg'] of w." in str(made)
    assert str(made).endswith("Use 0.")
    assert "In all" not in str(made)
    assert made.parted == [("w", PARAMETER, (2,)), ("w", "state['exp_avg']", (2,))]
    assert made.step == 7


def test_without_a_majority_all_are_named():
    made = error(Parted("w", PARAMETER, {4: "a", 9: "b"}), step=None)
    assert str(made).startswith("replicas have parted: ranks 4, 9 differ in w, and no majority")
    assert "<the rank that you trust>" in str(made)


def test_many_ranks_are_named_shortly():
    held = dict.fromkeys(range(1024), "a") | {5: "b", 6: "b"}
    assert "ranks 5, 6 differ from ranks 0-4, 7-1023 in w" in str(error(Parted("w", PARAMETER, held)))


def test_many_parameters_are_counted():
    parts = [Parted(f"w{i}", PARAMETER, {0: "a", 1: "b", 2: "b"}) for i in range(5)]
    message = str(error(*parts, parameters=6))
    assert "In all, 6 of 9 compared parameters differ." in message
    assert "w2" in message
    assert "w3" not in message
    assert "seed" not in message
    assert "another seed" in str(error(*parts, parameters=9))


def test_the_error_keeps_its_attributes_when_it_is_pickled():
    made = error(Parted("w", PARAMETER, {0: "a", 1: "b"}))
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is stablenum.ReplicasPartedError
    assert (str(again), again.step, again.parted) == (str(made), 7, [("w", PARAMETER, (0, 1))])
