"""What one process sees of its distributed configuration, as a value and as text."""

from __future__ import annotations

import json
import socket
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from camshaft.distributed.collectives import all_reduce
from camshaft.distributed.diagnostics.auto_backend import choose
from camshaft.distributed.diagnostics.installed import Status, backends, devices, versions
from camshaft.distributed.environments import detect
from camshaft.distributed.rooted_collectives import gather
from camshaft.distributed.run import current, finalize, initialize
from camshaft.distributed.topology import Topology
from camshaft.errors import table


@dataclass(frozen=True)
class Report:
    """What one process sees.

    Args:
        host: the name of the machine.
        versions: by library.
        devices: their descriptions, by name.
        backends: their status, by name.
        launcher: what started the process, ``None`` without a launcher.
        address: where rank 0 listens, ``None`` if the launcher does not say.
        topology: the place of the process, ``None`` if the environment variables contradict each other.
        sources: for each number of the topology, where it is from.
        auto: the backend of ``Parallel(backend="auto")``, and why.
        notes: warnings about the environment.
        proof: the result of trying a backend.
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
        """Return the report as one line of JSON."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        place = self.topology
        title = f"rank {place.rank} of {place.world_size} on {self.host}" if place else f"a process on {self.host}"
        where = f", rank 0 listens on {self.address}" if self.address else ""
        remarks = {
            "launcher": f"{self.launcher or 'none found'}{where}" if place else None,
            "backend 'auto'": self.auto,
            "tried": self.proof,
            "error": self.error,
        }
        lines = [title, "-" * len(title), *(f"note: {note}" for note in self.notes)]
        lines += [f"{what}: {text}" for what, text in remarks.items() if text]
        numbers = {name: str(value) for name, value in asdict(place).items()} if place else {}
        backends = {
            "available": {name: "yes" if status.available else "no" for name, status in self.backends.items()},
            "version": {name: status.version for name, status in self.backends.items() if status.version},
            "missing": {name: status.lack for name, status in self.backends.items() if status.lack},
        }
        tables = [table({"value": numbers, "from": self.sources})] if place else []
        tables += [table({"version": self.versions}), table({"device": self.devices}), table(backends)]
        return "\n\n".join(["\n".join(lines), *tables]) + "\n"


def inspect(environ: Mapping[str, str]) -> Report:
    """Report what a process with this environment sees, without any communication.

    >>> print(inspect({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}).sources["rank"])
    RANK=1
    """
    report = Report(socket.gethostname(), versions(), devices(), backends())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            launch = detect(environ)
            host = None if launch is None else launch.master_addr  # that of Slurm is looked up
        except RuntimeError as error:
            report = replace(report, error=str(error))
    report = replace(report, notes=tuple(str(warning.message) for warning in caught))
    if report.error:
        return report
    available = [name for name, status in report.backends.items() if status.available]
    auto, why = choose(environ, launch, None, available)
    report = replace(report, auto=f"{auto or 'a single process'}, as {why}")
    if launch is None:
        return replace(report, topology=Topology())
    follows = dict.fromkeys(asdict(launch.topology), "follows from the others")
    assumed = dict.fromkeys(launch.assumed, "assumed, as no variable says it")
    return replace(
        report,
        launcher=launch.launcher,
        address=f"{host}:{launch.master_port}" if host else None,
        topology=launch.topology,
        sources={**follows, **assumed, **launch.sources},
    )


def try_backend(report: Report, name: str) -> list[Report]:
    """Initialize a backend, reduce a number, and gather the reports of all ranks; every rank calls this.

    Returns:
        On rank 0 the reports, completed with what the backend found; an empty list on the other ranks.

    Raises:
        Exception: what the backend raises.
    """
    initialize(name)
    backend = current()
    size = backend.topology.world_size
    if (total := all_reduce(1)) != size:
        raise RuntimeError(f"the sum of 1 over {size} ranks must be {size}, got {total}")
    proof = f"{name}, all_reduce of 1 over {size} ranks gave {total}, on {backend.device}"
    sources = {number: report.sources.get(number, f"found by {name}") for number in asdict(backend.topology)}
    reports = gather(replace(report, topology=backend.topology, sources=sources, proof=proof))
    finalize()
    return reports or []
