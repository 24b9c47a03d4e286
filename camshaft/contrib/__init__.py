"""The part of PyTorch-Ignite's contrib package that scripts need: :mod:`camshaft.contrib.engines`."""
