"""What a reader has to follow: the functions and the files of the package that a call visits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import camshaft
import camshaft.distributed as idist
from camshaft.distributed.job import current
from tests.ranks import await_watchers, on_ranks

PACKAGE = str(Path(camshaft.__file__).parent)
INNER = ("<genexpr>", "<lambda>", "<listcomp>", "<dictcomp>", "<setcomp>")  # are read where they are written


def journey(function: Callable[[], Any]) -> tuple[int, int, str]:
    """Call a function; return how many functions of the package, in how many files, it visits, and their names."""
    visited: dict[CodeType, None] = {}

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in INNER:
            visited[code] = None

    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
    files = {code.co_filename for code in visited}
    names = [f"{Path(code.co_filename).relative_to(PACKAGE)} {code.co_name}" for code in visited]
    return len(visited), len(files), "\n".join(names)


@on_ranks(2)
def test_a_loader() -> None:
    await_watchers()
    with idist.use_backend(current()):  # which is not looked for, as in a job that `initialize` has joined
        functions, files, names = journey(lambda: idist.auto_dataloader(range(12), batch_size=4))
    assert functions <= 15, names
    assert files <= 8, names
