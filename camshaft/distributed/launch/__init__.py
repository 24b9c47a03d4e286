"""Starting the processes of a job."""

from __future__ import annotations
