"""Import torchvision with a torch that its compiled extension was not built for."""

from __future__ import annotations

import importlib
import re
import sys

import torch

MISSING = re.compile(r"operator (torchvision::\w+) does not exist")


def import_torchvision() -> None:
    """Import torchvision; if its operators cannot be loaded, declare them, so that the rest can be imported.

    Datasets and models do not need them. An example is a torch for the CPU with the torchvision of the package index,
    which is built for CUDA.
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
