"""The script draws all pictures of the pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
IMAGES = ROOT / "docs" / "images"


def test_the_script_draws_all_pictures(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error:::camshaft", str(ROOT / "scripts" / "pictures.py"), str(tmp_path)]
    environment = os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    made = {file.name: file.read_text("utf-8") for file in tmp_path.iterdir()}
    assert made.keys() == {file.name for file in IMAGES.glob("*.svg")}
    exact = ("collective", "concepts", "events", "inside", "layout", "ring")
    drawn = {name: content for name, content in made.items() if name.startswith(exact)}
    assert {name: (IMAGES / name).read_text("utf-8") for name in drawn} == drawn  # others have floating-point results
    for picture in (made["terminal.svg"], (IMAGES / "terminal.svg").read_text("utf-8")):
        assert picture.count('class="bar"') == picture.count("validation accuracy") == 3  # one per epoch
