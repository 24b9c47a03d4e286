"""Import the package before pytest does.

Otherwise, if pytest runs the doctests of a single module, it imports this module twice: as part of its package, and as
the module whose doctests it runs. The classes of the two copies are not the same.
"""

import camshaft.handlers  # noqa: F401
