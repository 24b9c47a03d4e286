"""The event files of an earlier run: TensorBoard is told which points to forget, as nothing can be cut from them."""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from camshaft.handlers.log_steps import Reached

_HEADER = struct.Struct("<QI")  # the length of a record, and a checksum of that
_FOOTER_BYTES = 4


class Point(NamedTuple):
    """A value of a summary, and when it was written."""

    step: int
    wall_time: float
    value: Any

    @property
    def path(self) -> tuple[str, ...]:
        """The name, in its parts."""
        return tuple(self.value.tag.split("/"))


def rewind(writer: Any, reached: Reached) -> set[tuple[str, int]]:
    """Hide what was written beyond the place where a run goes on; name what is there of its very step.

    TensorBoard forgets all points from one step on, whatever their name, when a new file says so. Where steps
    count different things, iterations of a trainer and epochs of its evaluators, this hides too much; what is
    still good of that is written again, with the times that it had.
    """
    writer.flush()
    folder = Path(writer.file_writer.get_logdir())
    points = _points(folder, writer)
    there = {("/".join(point.path), point.step) for point in points if reached.is_last(point.path, point.step)}
    beyond = [point for point in points if reached.is_beyond(point.path, point.step)]
    if not beyond:
        return there
    first = min(point.step for point in beyond)
    good = [point for point in points if point.step >= first and not reached.is_beyond(point.path, point.step)]
    writer.close()
    _wait_for_a_new_name(folder)
    writer.purge_step = first  # read when the writer opens its next file
    file_writer = _next_file(writer, room_for=len(good))
    event_class = _event_class(writer)
    for point in good:
        event = event_class()
        event.summary.value.append(point.value)
        file_writer.add_event(event, point.step, point.wall_time)
    writer.flush()
    return there


def _next_file(writer: Any, room_for: int) -> Any:
    """Let the writer open its next file, with a queue that takes so many events without a wait for each."""
    setting = "max_queue" if hasattr(writer, "max_queue") else "_max_queue"  # of torch, and of tensorboardX
    given = getattr(writer, setting)
    setattr(writer, setting, given + room_for)
    file_writer = writer._get_file_writer()
    setattr(writer, setting, given)
    return file_writer


def _points(folder: Path, writer: Any) -> list[Point]:
    """Read all points that TensorBoard shows, in the order in which it reads them."""
    points: list[Point] = []
    event_class = _event_class(writer)
    for file in sorted(folder.glob("*tfevents*")):
        for record in _records(file):
            event = event_class.FromString(record)
            if event.HasField("session_log") and event.session_log.status == event.session_log.START:
                points = [point for point in points if point.step < event.step]
            points += [Point(event.step, event.wall_time, value) for value in event.summary.value]
    return points


def _wait_for_a_new_name(folder: Path) -> None:
    """Wait for the second after that of the newest file: files are named, and read in the order of, their seconds."""
    seconds = [file.name.partition("tfevents.")[2].partition(".")[0] for file in folder.glob("*tfevents*")]
    newest = max((int(one) for one in seconds if one.isdigit()), default=0)
    if 0 <= newest - int(time.time()) <= 1:
        time.sleep(newest + 1 - time.time())


def _records(file: Path) -> Iterator[bytes]:
    """Read the records of an event file; what a kill has left of the last one is left out."""
    with open(file, "rb") as stream:
        while len(header := stream.read(_HEADER.size)) == _HEADER.size:
            length, _ = _HEADER.unpack(header)
            record = stream.read(length)
            if len(record) < length or len(stream.read(_FOOTER_BYTES)) < _FOOTER_BYTES:
                return
            yield record


def _event_class(writer: Any) -> Any:
    """Find the class of events that the library of the writer uses."""
    return sys.modules[type(writer._get_file_writer()).__module__].event_pb2.Event
