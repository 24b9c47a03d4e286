"""torchvision next to a torch that its compiled part was not made for."""

from __future__ import annotations

import importlib
import re
import sys

import torch

MISSING = re.compile(r"operator (torchvision::\w+) does not exist")


def import_torchvision() -> None:
    """Import torchvision; where its own operators cannot be loaded, declare them, so that the rest of it can.

    Data sets and models need none of them. A torch for the CPU and the torchvision of the package index, which is
    made for CUDA, are such a pair.
    """
    while True:
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            found = MISSING.search(str(error))
            if found is None:
                raise
            torch.library.define(found.group(1), "(Tensor x) -> Tensor")
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]
        else:
            return
