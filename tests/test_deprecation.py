from __future__ import annotations

import inspect
import warnings

import pytest

from camshaft.deprecation import deprecated


def make(doc="Do it.", **options):
    def old(a: int, b: int = 2) -> int:
        return a + b

    old.__doc__ = doc
    return deprecated("0.2.0", **options)(old)


def test_each_call_warns_at_its_own_line_and_works():
    old = make()
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match="old is deprecated since version 0.2.0") as caught:
            assert old(1, b=4) == 5
        assert [warning.filename for warning in caught] == [__file__]


def test_defining_it_warns_nobody():
    with warnings.catch_warnings(record=True) as caught:
        make()
    assert caught == []


def test_the_warning_names_the_version_of_the_removal_and_the_reasons():
    text = r"0\.2\.0 and will be removed in version 0\.4\.0\. Slow\. Use new\(\)\."
    with pytest.warns(DeprecationWarning, match=text):
        make(removed_in="0.4.0", reasons=("Slow.", "Use new()."))(1)


def test_a_single_reason_may_be_a_bare_string():
    with pytest.warns(DeprecationWarning, match=r"Use new\(\)\.$"):
        make(reasons="Use new().")(1)


@pytest.mark.filterwarnings("ignore")  # else a mere warning would be raised too
def test_the_warning_can_be_raised_instead():
    calls = []
    old = deprecated("0.2.0", raise_exception=True)(calls.append)
    with pytest.raises(DeprecationWarning, match="append is deprecated"):
        old(1)
    assert calls == []


@pytest.mark.parametrize("doc", ["Do it.\n\n        At length.\n    ", None])
def test_the_docstring_is_marked(doc):
    marked = make(doc, reasons=["Use new()."]).__doc__
    assert marked.startswith("Do it.\n\nAt length.\n\n.. deprecated:: 0.2.0\n" if doc else ".. deprecated:: 0.2.0\n")
    assert "    Use new()." in marked.splitlines()


def test_name_and_signature_stay():
    old = make()
    assert old.__name__ == "old"
    assert list(inspect.signature(old).parameters) == ["a", "b"]


def test_all_parameters_have_the_places_of_the_api():
    parameters = inspect.signature(deprecated).parameters.values()
    assert [(parameter.name, parameter.default) for parameter in parameters] == [
        ("deprecated_in", inspect.Parameter.empty),
        ("removed_in", ""),
        ("reasons", ()),
        ("raise_exception", False),
    ]
