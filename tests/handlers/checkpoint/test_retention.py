"""Which checkpoints are kept."""

from __future__ import annotations

import pytest

from camshaft.handlers.checkpoint.retention import Item, retained

A, B, C = Item(1, "a"), Item(2, "b"), Item(3, "c")


@pytest.mark.parametrize(
    ("items", "new", "n_saved", "options", "expected"),
    [
        ([A, B], Item(0, "z"), 2, {"by_score": False}, (["b", "z"], ["a"])),
        ([A, B], Item(5, "a"), 2, {"by_score": False}, (["b", "a"], [])),
        ([A, B, C], Item(4, "z"), 2, {"by_score": False}, (["c", "z"], ["a", "b"])),  # n_saved was larger
        ([A, B], Item(4, "z"), None, {"by_score": True}, (["a", "b", "z"], [])),
        ([A, B], Item(0, "z"), 3, {"by_score": True}, (["z", "a", "b"], [])),
        ([A, B], Item(0, "z"), 2, {"by_score": True}, None),
        ([A, B], Item(0, "z"), 2, {"by_score": True, "always": True}, (["z", "b"], ["a"])),
        ([A, B], Item(1, "z"), 2, {"by_score": True}, None),
        ([A, B], Item(1, "z"), 2, {"by_score": True, "ties_win": True}, (["z", "b"], ["a"])),
        ([A, B], Item(1.5, "b"), 3, {"by_score": True}, None),  # in place of a better one
        ([A, B], Item(2, "b"), 2, {"by_score": True}, (["a", "b"], [])),
        ([A, B], Item(1.5, "b"), 3, {"by_score": True, "always": True}, (["a", "b"], [])),
        ([A, B, C], Item(2.5, "z"), 1, {"by_score": True}, None),
        ([A, B, C], Item(4, "z"), 1, {"by_score": True}, (["z"], ["a", "b", "c"])),
    ],
)
def test_retention_by_score_and_by_age(items, new, n_saved, options, expected):
    after = retained(items, new, n_saved, **options)
    assert (after and ([item.filename for item in after[0]], after[1])) == expected
