"""What one process sees of its distributed configuration, as a value and as text."""

from __future__ import annotations

import json
import socket
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from camshaft.distributed import context
from camshaft.distributed.choice import choose
from camshaft.distributed.collectives import all_reduce
from camshaft.distributed.environments import detect
from camshaft.distributed.installed import Status, backends, devices, versions
from camshaft.distributed.parts import gather
from camshaft.distributed.topology import Launch, Topology
from camshaft.text import table


@dataclass(frozen=True)
class Report:
    """What one process sees.

    Args:
        host: name of the machine.
        versions: by library.
        devices: what they are, by name.
        backends: by name.
        launcher: who started the process, ``None`` if nobody did.
        address: where rank 0 listens, ``None`` where the launcher does not say.
        topology: where the process stands, ``None`` where the environment contradicts itself.
        sources: what each number of the topology is known from.
        auto: the backend of ``Parallel(backend="auto")``, and why.
        notes: warnings about the environment.
        proof: what a backend did that was tried.
        error: what is wrong, ``None`` if nothing is.
    """

    host: str
    versions: dict[str, str]
    devices: dict[str, str]
    backends: dict[str, Status]
    launcher: str | None = None
    address: str | None = None
    topology: Topology | None = None
    sources: dict[str, str] = field(default_factory=dict)
    auto: str | None = None
    notes: tuple[str, ...] = ()
    proof: str | None = None
    error: str | None = None

    def json(self) -> str:
        """Give all of it in one line."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        """Lay it out for people."""
        place = self.topology
        title = f"rank {place.rank} of {place.world_size} on {self.host}" if place else f"a process on {self.host}"
        tables = [
            table({"value": _texts(place), "from": self.sources}) if place else "",
            table({"version": self.versions}),
            table({"device": self.devices}),
            _table_of_backends(self.backends),
        ]
        heading = "\n".join([title, "-" * len(title), *self._remarks()])
        return "\n\n".join([heading, *filter(None, tables)]) + "\n"

    def _remarks(self) -> list[str]:
        """Tell what is no table."""
        where = f", rank 0 listens on {self.address}" if self.address else ""
        remarks = {
            "launcher": f"{self.launcher or 'none found'}{where}" if self.topology else None,
            "backend 'auto'": self.auto,
            "tried": self.proof,
            "error": self.error,
        }
        return [f"note: {note}" for note in self.notes] + [f"{what}: {text}" for what, text in remarks.items() if text]


def look(environ: Mapping[str, str]) -> Report:
    """Report what a process with this environment sees, without any communication.

    >>> print(look({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}).sources["rank"])
    RANK=1
    """
    launch, address, error = None, None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            launch = detect(environ)
            address = None if launch is None else launch.master_addr  # that of Slurm is looked up
        except RuntimeError as failure:
            error = str(failure)
    notes = tuple(str(warning.message) for warning in caught)
    report = Report(socket.gethostname(), versions(), devices(), backends(), notes=notes, error=error)
    return report if error else _placed(report, launch, address, environ)


def try_out(report: Report, name: str) -> list[Report]:
    """Begin a run, reduce a number, and gather what all ranks report; every rank calls this.

    Returns:
        The reports, completed with what the backend found, on rank 0; nothing on the others.

    Raises:
        Exception: what the backend raises.
    """
    context.initialize(name)
    backend = context.current()
    size = backend.topology.world_size
    if (total := all_reduce(1)) != size:
        raise RuntimeError(f"the sum of 1 over {size} ranks must be {size}, got {total}")
    proof = f"{name}, all_reduce of 1 over {size} ranks gave {total}, on {backend.device}"
    sources = {number: report.sources.get(number, f"found by {name}") for number in asdict(backend.topology)}
    reports = gather(replace(report, topology=backend.topology, sources=sources, proof=proof))
    context.finalize()
    return reports or []


def _placed(report: Report, launch: Launch | None, host: str | None, environ: Mapping[str, str]) -> Report:
    """Add where the process stands."""
    available = [name for name, status in report.backends.items() if status.available]
    auto, why = choose(environ, launch, None, available)
    report = replace(report, auto=f"{auto or 'a single process'}, as {why}")
    if launch is None:
        return replace(report, topology=Topology())
    assumed = dict.fromkeys(launch.assumed, "assumed, as nothing says it")
    follows = dict.fromkeys(asdict(launch.topology), "follows from the others")
    address = f"{host}:{launch.master_port}" if host else None
    sources = {**follows, **assumed, **launch.sources}
    return replace(report, launcher=launch.launcher, address=address, topology=launch.topology, sources=sources)


def _texts(topology: Topology) -> dict[str, str]:
    return {number: str(value) for number, value in asdict(topology).items()}


def _table_of_backends(statuses: Mapping[str, Status]) -> str:
    return table(
        {
            "available": {name: "yes" if status.available else "no" for name, status in statuses.items()},
            "version": {name: status.version for name, status in statuses.items() if status.version},
            "missing": {name: status.lack for name, status in statuses.items() if status.lack},
        }
    )
