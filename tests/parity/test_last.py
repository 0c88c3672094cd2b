"""What the last step was can be read as entries and as attributes, in both frameworks."""

import copy
import json
import pickle

import jax.numpy as jnp
import optax
import pytest
import torch

import stablenum_jax
import stablenum_torch


def last_of(framework):
    if framework == "torch":
        opt = stablenum_torch.wrap(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))
        opt.param_groups[0]["params"][0].grad = torch.tensor([1.0, float("nan")])
        opt.step()
        return opt.last
    tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
    params = jnp.ones(2)
    _, state = stablenum_jax.step(tx, params, tx.init(params), jnp.array([1.0, jnp.nan]))
    return stablenum_jax.metrics(state)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_entries_are_attributes(framework):
    last = last_of(framework)
    assert last.reason is last["reason"]
    assert last.reason.name == "NAN_GRADIENT"
    assert not last.applied
    assert last.skipped_total == 1
    assert isinstance(last, dict)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_field_that_is_not_there_is_named_with_those_that_are(framework):
    with pytest.raises(AttributeError, match="a step has no 'cause'; it has step, loss, grad_norm"):
        _ = last_of(framework).cause


def test_it_is_copied_pickled_and_written_as_a_dict():
    last = last_of("torch")
    for other in (copy.copy(last), copy.deepcopy(last), pickle.loads(pickle.dumps(last))):
        assert other.reason is last.reason
    assert json.loads(json.dumps({"applied": last.applied, "step": last["step"]}))["applied"] is False
