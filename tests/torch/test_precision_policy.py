"""Policies on modules: formats in every module, unchanged structure, complete removal."""

from __future__ import annotations

import collections
import copy
import dataclasses

import jax.numpy as jnp
import jmp
import pytest
import torch
from torch import nn

import stablenum
import stablenum_torch as st
from stablenum.precision.policy import as_policy
from stablenum_torch._precision import cast_floating
from tests.selection import only

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Block(nn.Module):
    """A transformer block with attention that uses a submodule's weights without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Embedding, position, blocks, and a head tied to the embedding."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.randn(5, 8) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(8)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.T


def transformer() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


TOKENS = torch.arange(10).reshape(2, 5)
# The output of the last norm goes to a product outside of any module.
POLICY = stablenum.Policy.parse("p=f32,c=bf16,o=f32", rules={"*norm*": "float32", "norm": "o=bf16"})


def dtypes(model: nn.Module, x) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """The dtypes that each module really receives and returns."""
    seen, handles = {}, []
    for path, module in model.named_modules():

        def look(module, args, out, path=path):
            first = out[0] if isinstance(out, tuple) else out
            seen[path] = (args[0].dtype, first.dtype)

        handles.append(module.register_forward_hook(look))
    model(x)
    for handle in handles:
        handle.remove()
    return seen


def test_the_formats_are_where_the_policy_says() -> None:
    model = transformer()
    st.precision(model, POLICY)
    seen = dtypes(model, TOKENS)
    assert seen[""] == (torch.int64, F32)
    assert seen["embed"] == (torch.int64, BF16)
    for path in ("blocks.0.attn", "blocks.1.mlp.0", "blocks.1.mlp.1", "blocks.0.mlp.2"):
        assert seen[path] == (BF16, BF16), path
    for path in ("blocks.0.norm1", "blocks.1.norm2"):
        assert seen[path] == (F32, F32), path
    assert seen["norm"] == (F32, BF16)
    assert {p.dtype for p in model.parameters()} == {F32}


def test_gradients_arrive_in_the_parameters_format_and_are_nearly_those_of_float32() -> None:
    model, other = transformer(), transformer()
    st.precision(model, POLICY)
    for m in (model, other):
        m(TOKENS).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert p.grad.dtype == F32
        assert p.grad is not None
        assert (p.grad - q.grad).norm() <= 0.05 * q.grad.norm() + 1e-6, name


@pytest.mark.parametrize("words", ["bf16", "f16", "p=bf16,c=bf16,o=f32", "p=f16,c=f32", "f32", "f64"])
def test_parameters_are_kept_as_asked_and_stay_the_same_objects(words: str) -> None:
    model = transformer()
    params, policy = list(model.parameters()), as_policy(words)
    st.precision(model, policy)
    assert all(p is q for p, q in zip(model.parameters(), params, strict=True))
    assert {p.dtype for p in params} == {getattr(torch, policy.params)}
    assert model.count.dtype == torch.int64
    out = model(TOKENS)
    assert out.dtype == getattr(torch, policy.output)
    out.float().sum().backward()
    assert {p.grad.dtype for p in params} == {getattr(torch, policy.params)}


def test_the_numbers_are_those_of_a_model_cast_by_hand() -> None:
    model, plain = transformer(), transformer().bfloat16()
    st.precision(model, "p=f32,c=bf16,o=bf16")
    assert torch.equal(model(TOKENS), plain(TOKENS))


def test_running_statistics_stay_wide_where_the_policy_computes_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    st.precision(model, stablenum.Policy.parse("bf16", rules={"1": "float32"}))
    assert model[1].running_mean.dtype == F32
    assert model[1].weight.dtype == model[0].weight.dtype == BF16
    out = model(torch.randn(16, 4))
    assert out.dtype == BF16
    assert model[1].running_mean.abs().max() > 0
    assert model[1].num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize("how", ["casts", "autocast"])
@pytest.mark.parametrize("words", ["p=f32,c=bf16", "p=f32,c=f16", "bf16", "f16", "p=bf16,c=f32", "f64"])
def test_batch_norms_compute_in_every_format(words: str, how: str) -> None:
    policy = as_policy(words)
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4))
    with st.precision(model, policy, how=how) as handle:
        out = model(torch.randn(5, 3, 8))
        out.float().square().sum().backward()
        assert out.dtype == getattr(torch, policy.output)
        assert {p.grad.dtype for p in model.parameters()} == {getattr(torch, policy.params)}
        assert model[1].running_mean.dtype == (torch.float64 if words == "f64" else F32)
        assert model[1].running_mean.abs().max() > 0
        with handle.at_least("float32"):
            model(torch.randn(5, 3, 8))
        model.eval()
        assert model(torch.randn(5, 3, 8)).dtype == getattr(torch, policy.output)


@pytest.mark.parametrize("words", ["bf16", "f16", "p=bf16,c=f32"])
def test_islands_under_autocast_take_narrow_parameters(words: str) -> None:
    model = transformer()
    st.precision(model, stablenum.Policy.parse(words, rules={"*norm*": "float32"}), how="autocast")
    model(TOKENS).float().sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {getattr(torch, as_policy(words).params)}


def test_in_a_wider_format_the_output_is_wider_too() -> None:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 6e4)
    handle = st.precision(model, "p=f32,c=f16")
    assert model(torch.ones(1, 2)).isinf().all()
    with handle.at_least("float32"):
        out = model(torch.ones(1, 2))
    assert (out.dtype, out.isfinite().item()) == (F32, True)


def test_rules_give_modules_their_own_parameters_and_outputs() -> None:
    model = nn.Sequential(collections.OrderedDict(a=nn.Linear(2, 2), b=nn.Linear(2, 2), c=nn.Linear(2, 2)))
    st.precision(model, stablenum.Policy.parse("bf16", rules={"a": "p=f32", "b": "c=f16,o=f32"}))
    assert [p.dtype for p in model.parameters()] == [F32] * 2 + [BF16] * 4
    assert dtypes(model, torch.ones(1, 2)) == {
        "": (BF16, BF16),
        "a": (BF16, BF16),
        "b": (F16, F32),
        "c": (BF16, BF16),
    }


@pytest.mark.parametrize("how", ["casts", "autocast"])
def test_removing_a_policy_restores_the_model(how: str) -> None:
    model = transformer()
    before, keys = model(TOKENS), list(model.state_dict())
    with st.precision(model, POLICY, how=how) as handle:
        assert list(model.state_dict()) == keys
        assert not torch.equal(model(TOKENS), before)
        with pytest.raises(ValueError, match="model must not have a policy yet"):
            st.precision(model, POLICY)
    handle.remove()  # removing twice is harmless
    assert torch.equal(model(TOKENS), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_policy_with_autocast_instead_of_casts() -> None:
    model = transformer()
    st.precision(model, POLICY, how="autocast")
    seen = dtypes(model, TOKENS)
    assert seen["blocks.0.mlp.0"][1] == BF16
    assert seen["norm"] == (F32, BF16)
    assert seen[""][1] == F32
    assert not torch.is_autocast_enabled("cpu")
    model(TOKENS).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {F32}


@pytest.mark.parametrize("outside", [False, True])
def test_autocast_is_off_in_a_module_that_computes_in_float32(outside: bool) -> None:
    """Although it is on in the model around the module, and perhaps in the user's code."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))
    x = torch.randn(3, 8).bfloat16().float()  # the model around the module rounds its input
    exact, found = model[0](x), []
    st.precision(model, stablenum.Policy.parse("p=f32,c=bf16", rules={"0": "float32"}), how="autocast")
    model[0].register_forward_hook(lambda module, args, out: found.append(out))
    with torch.autocast("cpu", enabled=outside):
        assert model(x).dtype == BF16
    torch.testing.assert_close(found[0], exact)


def test_an_error_inside_leaves_nothing_behind() -> None:
    for how in ("casts", "autocast"):
        model = transformer()
        st.precision(model, POLICY, how=how)
        good = model(TOKENS)
        with pytest.raises(IndexError):
            model(TOKENS + 50)
        assert not torch.is_autocast_enabled("cpu")
        assert all(
            isinstance(p, nn.Parameter)
            for m in model.modules()
            for p in m._parameters.values()
            if p is not None
        )
        assert torch.equal(model(TOKENS), good)


def test_parts_can_be_called_alone_and_recomputed() -> None:
    model, other = transformer(), transformer()
    for m in (model, other):
        st.precision(m, POLICY)
    assert model.blocks[0].mlp(torch.ones(1, 8)).dtype == BF16
    x = torch.randn(2, 5, 8)
    for reentrant in (False, True):
        for m in (model, other):
            m.zero_grad()
        a = x.clone().requires_grad_()
        torch.utils.checkpoint.checkpoint(
            model.blocks[0], a, use_reentrant=reentrant
        ).float().sum().backward()
        other.blocks[0](x).float().sum().backward()
        for p, q in zip(model.blocks[0].parameters(), other.blocks[0].parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("make", [lambda: nn.LSTM(3, 4, 2), lambda: nn.GRU(3, 4, bidirectional=True)])
def test_recurrent_layers_compute_in_the_format_of_the_policy(make) -> None:
    torch.manual_seed(0)
    rnn = make()
    plain = copy.deepcopy(rnn).bfloat16()
    x = torch.randn(5, 2, 3)
    with st.precision(rnn, "p=f32,c=bf16"):
        assert torch.equal(rnn(x)[0], plain(x.bfloat16())[0])
    assert rnn(x)[0].dtype == F32


def test_a_copy_has_a_policy_of_its_own() -> None:
    model = transformer()
    handle = st.precision(model, POLICY)
    twin = copy.deepcopy(model)
    out = model(TOKENS)
    assert torch.equal(twin(TOKENS), out)
    handle.remove()
    assert torch.equal(twin(TOKENS), out)
    assert not torch.equal(model(TOKENS), out)
    out = twin(TOKENS).sum()
    out.backward()
    assert model.position.grad is None
    assert twin.position.grad is not None


# After a graph break the compiler reads `.grad` of its inputs; only strict filters show the warning.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("how", only(["autocast"], ["casts", "autocast"]))
def test_a_compiled_model_computes_the_same(how: str) -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    st.precision(model, stablenum.Policy.parse("p=f32,c=bf16,o=f32", rules={"1": "float32"}), how=how)
    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), model(x))


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    n: torch.Tensor
    name: str = "b"


Pair = collections.namedtuple("Pair", "a b")


def test_casts_keep_structure_and_leave_the_rest_alone() -> None:
    x, n, flag, z = torch.ones(2), torch.arange(2), torch.tensor([True]), torch.ones(2, dtype=torch.complex64)
    f8 = torch.ones(2).to(torch.float8_e4m3fn)
    given = {
        "pair": Pair(x, [n, (x, None)]),
        "batch": Batch(x, n),
        "order": collections.OrderedDict(k=x, j=3.5),
        "rest": (flag, z, f8, "text", 3, None),
    }
    made = cast_floating(given, BF16)
    assert (
        made["pair"].a.dtype
        == made["pair"].b[1][0].dtype
        == made["batch"].x.dtype
        == made["order"]["k"].dtype
        == BF16
    )
    assert isinstance(made["pair"], Pair)
    assert isinstance(made["batch"], Batch)
    assert list(made["order"]) == ["k", "j"]
    assert made["rest"] is given["rest"]
    assert made["pair"].b[0] is n
    assert made["batch"].n is n
    back = cast_floating(made, F32)
    assert torch.equal(back["batch"].x, x)
    assert given["batch"].x.dtype == F32
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([3, 2]))
    assert type(cast_floating(packed, BF16)) is type(packed)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_casts_round_trip(dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(cast_floating(cast_floating(values, F32), dtype), values)


def test_keyword_arguments_and_outputs_of_any_kind() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, *, x, mask):
            return {"y": x * self.w, "mask": mask, "none": None}

    model = Odd()
    st.precision(model, "p=f32,c=f16,o=f32")
    out = model(x=torch.ones(2), mask=torch.tensor([True]))
    assert (out["y"].dtype, out["mask"].dtype, out["none"]) == (F32, torch.bool, None)


def test_policies_of_any_kind_are_taken() -> None:
    theirs = jmp.get_policy("params=float32,compute=bfloat16,output=float16")
    assert as_policy(theirs) == stablenum.Policy(params="float32", compute="bfloat16", output="float16")
    assert as_policy(jmp.Policy(jnp.float16, jnp.float16, jnp.float32)).output == "float32"
    assert as_policy(POLICY) is POLICY


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: st.precision(3, POLICY), TypeError, r"model must be a torch\.nn\.Module"),
        (lambda m: st.precision(m, 3), TypeError, r"policy must be a stablenum\.Policy, a string"),
        (lambda m: st.precision(m, "int8"), ValueError, "format must be one of"),
        (lambda m: st.precision(m, POLICY, how="magic"), ValueError, "how must be 'casts' or 'autocast'"),
        (
            lambda m: st.precision(m, "fp8", forward_scaling=3),
            ValueError,
            "forward_scaling must be None or a",
        ),
        (
            lambda m: st.precision(m, stablenum.Policy(rules={"*softmax*": "f32"})),
            ValueError,
            r"patterns that match a module of the model; got '\*softmax\*'",
        ),
    ],
)
def test_wrong_arguments_are_named(call, error, message) -> None:
    model = transformer()
    with pytest.raises(error, match=message):
        call(model)
    assert not any(m._forward_hooks for m in model.modules())
