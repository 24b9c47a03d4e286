"""Steps hold each position once, and each rank has a share of every step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from camshaft.data.partition import even_partition, partition_of_batches

RANKS = st.integers(1, 5)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), RANKS)
def test_batches_that_are_too_small_for_all_ranks_join_others(sizes, ranks):
    if sum(sizes) < ranks:
        with pytest.raises(ValueError, match="cannot be distributed"):
            partition_of_batches(0, sizes, ranks)
        return
    partition = partition_of_batches(0, sizes, ranks)
    bounds = [partition.bounds(step) for step in range(partition.steps)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == sum(sizes)
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(bounds))
    assert all(end - begin >= ranks for begin, end in bounds)


def test_an_even_partition_of_nothing_has_no_steps():
    assert even_partition(4, 4, 2, 2).steps == 0
