"""A few pairs of programs that others wrote; ``tests/pairs`` has them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pairs.judged import cases, judged


@pytest.mark.parametrize("case", ["gru_cells_nnx", "gru_hard_sigmoid", "vq_eqx"])
def test_a_pair_is_judged_as_its_author_says(case: str, tmp_path: Path) -> None:
    found = judged("tuned", cases("tuned")[case], tmp_path)
    if cases("tuned")[case]["kind"] == "equivalent":
        assert found.ok
    else:
        assert found.left
        assert found.right
        assert found.cause
        assert found.confirmed


def test_replaced_values_leave_the_numbers_of_the_others(tmp_path: Path) -> None:
    """In this pair a sum of gradients cancels once a value is replaced."""
    found = judged("within", cases("within")["resnet_pool_copy"], tmp_path)
    assert found.left
    assert found.right
