"""Names of tensors for the checkup: no two share one, and none is inherited from a tensor that is gone."""

from __future__ import annotations

import torch
from torch import nn

from stablenum_torch._diagnosis.checkup.held import plain_tensors, unique


def test_two_tensors_of_one_name_are_told_apart_and_keep_their_names() -> None:
    names = {1: ("parameter", "0.weight"), 2: ("parameter", "0.weight")}
    found = unique(names, {})
    assert found == {1: ("parameter", "0.weight"), 2: ("parameter", "0.weight (2)")}
    assert unique(names, found) == found


def test_a_reused_id_does_not_inherit_a_name() -> None:
    before = {1: ("buffer", "norm.running_mean")}
    assert unique({1: ("parameter", "out.bias")}, before) == {1: ("parameter", "out.bias")}


def test_plain_tensors_of_a_module_are_found_in_attributes_lists_and_dicts() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.parts = torch.ones(2, 2), [torch.ones(3, 3)]
            self.named, self.vector = {"a": torch.ones(4, 4)}, torch.ones(2)

    net = Net()
    found = plain_tensors()
    tensors = [net.w, net.parts[0], net.named["a"]]
    assert [found[id(t)][1] for t in tensors] == ["w", "parts.0", "named.a"]
    assert id(net.vector) not in found
