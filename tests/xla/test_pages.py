"""Run the code about XLA on the pages of docs/."""

from __future__ import annotations

import sys

from tests.docs.titled import run, titled


def test_gradients_are_clipped_after_they_are_averaged(tmp_path):
    code = titled("reference/backends.md", "clip.py")
    assert 'backend="xla-tpu"' in code
    run([sys.executable], tmp_path / "clip.py", code)
