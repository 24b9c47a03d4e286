"""Arguments of events, for tests with hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

windows = st.fixed_dictionaries(
    {}, optional={"every": st.integers(1, 12), "before": st.integers(0, 40), "after": st.integers(0, 25)}
).filter(bool)
onces = st.one_of(st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=5)).map(lambda k: {"once": k})
