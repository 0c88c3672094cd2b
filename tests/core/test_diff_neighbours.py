"""How far the surroundings of two parameters agree: as many rounds as their descriptions do."""

from __future__ import annotations

import numpy as np
import pytest

from stablenum.diagnosis.diff.weights.neighbours import _alike


@pytest.mark.parametrize("seed", range(30))
def test_descriptions_agree_up_to_the_round_in_which_they_part(seed: int) -> None:
    draw = np.random.default_rng(seed)
    mine = draw.integers(0, 9, draw.integers(0, 70)).tolist()
    shared = int(draw.integers(0, len(mine) + 1))
    # Whatever has another description after a round has another one after each later round.
    theirs = mine[:shared] + [10 + n for n in range(int(draw.integers(0, 20)))]
    assert _alike(mine, theirs) == sum(a == b for a, b in zip(mine, theirs, strict=False)) == shared
