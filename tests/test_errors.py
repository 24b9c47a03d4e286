from __future__ import annotations

import pytest

from camshaft.arguments import described
from camshaft.errors import NotComputableError, annotate
from camshaft.exceptions import NotComputableError as FromTheApi


class WithoutAddNote(Exception):
    """Behaves like an exception in Python 3.10."""

    @property
    def add_note(self) -> None:
        raise AttributeError("add_note")


def test_not_computable_error_is_a_runtime_error_and_the_same_class_under_both_names():
    assert issubclass(NotComputableError, RuntimeError)
    assert FromTheApi is NotComputableError


@pytest.mark.parametrize("error", [ValueError("broken"), WithoutAddNote("broken")])
def test_annotate_keeps_notes_in_order_and_the_message(error):
    annotate(error, "first")
    annotate(error, "second")
    assert error.__notes__ == ["first", "second"]
    assert str(error) == "broken"


def test_classes_of_the_top_module_of_ignite_are_described():
    theirs = type("Theirs", (), {"__module__": "ignite"})
    assert described(theirs()).endswith("of type Theirs; Theirs comes from PyTorch-Ignite")
