"""`spawn` starts processes that find each other, tells what fails there, and leaves none behind, however it ends.

The processes come from the forkserver that tests/ranks.py has set up, or are forked from one that does, which is quick;
the script at the end is started as users start theirs.
"""

from __future__ import annotations

import functools
import gc
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

import camshaft.distributed as idist
from camshaft.distributed.backends.registry import module_of
from camshaft.distributed.failures import watcher
from camshaft.distributed.launch import spawn as launch
from camshaft.distributed.launch import work
from camshaft.errors import RankFailedError
from tests.distributed.observed import batch, torchrun
from tests.guards import children, is_running, outlasting
from tests.limits import FOREVER, HANG, TIMEOUT, wait_until
from tests.ranks import context
from tests.torchrun.launching import free_port

ROOT = Path(__file__).resolve().parents[3]
start = functools.partial(idist.spawn, start_method="forkserver", timeout=TIMEOUT)


# --- what the processes do ---------------------------------------------------------------------------------------


def tell(local_rank, folder, **more):
    """Write down where a process stands."""
    told = {
        "given": [local_rank, more],
        "sum": idist.all_reduce(idist.get_rank()),
        "place": [idist.get_rank(), idist.get_local_rank(), idist.get_world_size()],
        "nodes": [idist.get_node_rank(), idist.get_nnodes(), idist.get_nproc_per_node()],
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "backend": idist.backend(),
    }
    Path(folder, str(idist.get_rank())).write_text(json.dumps(told))


VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def told_in(folder):
    return [json.loads((folder / name).read_text()) for name in sorted(os.listdir(folder))]


def tell_and_begin_anew(local_rank, folder, **more):
    """What else reads the environment finds the others too."""
    tell(local_rank, folder, **more)
    size = idist.get_world_size()
    idist.finalize()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    number = torch.ones(1)
    dist.all_reduce(number)
    assert number == size
    assert idist.all_reduce(1) == size
    assert idist.get_local_rank() == local_rank


def in_debug_mode(local_rank):
    (idist.barrier if local_rank else idist.all_gather)(*[1][local_rank:])


class StubbornError(Exception):
    """An error that cannot be pickled, and whose text is long."""

    def __init__(self, length):
        super().__init__(length)
        self.function = lambda: length

    def __str__(self):
        return "beginning" + "x" * self.args[0] + "end"


def be_patient():
    """Let this process tell others, and learn from them, however long the watchers take: that is not what is tested."""
    watcher._TELLING = watcher._LEARNING = HANG


def fail(local_rank, how):
    """Let the second process fail in some way while the first waits for it."""
    be_patient()
    if local_rank == 1:
        HOW[how]()
    idist.barrier()


def raise_it(error):
    raise error


HOW = {
    "raises": lambda: raise_it(StubbornError(3)),
    "exits": lambda: sys.exit(3),
    "exits at once": lambda: os._exit(5),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def leave(local_rank):
    """Let the second process end while the first waits for it."""
    be_patient()
    if local_rank == 1:
        os._exit(0)
    idist.all_reduce(1)


def exit_well(local_rank):
    idist.isend("before the end", 1 - local_rank)
    idist.recv(1 - local_rank)
    sys.exit(0 if local_rank else None)


def hang(local_rank, folder, how):
    """Write down who this is, and do not end."""
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(folder, f"{local_rank} of {os.getppid()}").write_text(str(os.getpid()))
    while how != "in a collective":
        time.sleep(1)
    if local_rank == 0:
        idist.barrier()
    time.sleep(9000)


def hang_until_the_other_fails(local_rank, folder):
    if local_rank == 0:
        hang(0, folder, "deaf")
    while not list(Path(folder).iterdir()):
        time.sleep(0.01)
    raise ValueError("enough")


@pytest.fixture
def patience(monkeypatch):
    """Wait until all processes, which end by themselves, have reported how they failed."""
    monkeypatch.setattr(work, "GRACE", HANG)


# --- what they find ----------------------------------------------------------------------------------------------


def test_processes_know_their_place_and_what_they_were_given(tmp_path):
    assert start("gloo", tell_and_begin_anew, (str(tmp_path),), {"epochs": 3}, nproc_per_node=2) is None
    for rank, told in enumerate(told_in(tmp_path)):
        assert (told["given"], told["sum"]) == ([rank, {"epochs": 3}], 1)
        assert (told["place"], told["nodes"]) == ([rank, rank, 2], [0, 1, 2])
        assert list(told["variables"].values()) == [str(rank), str(rank), "2", "2", "0", "1"]
        assert told["backend"] == "gloo"
    assert idist.backend() is None
    assert not dist.is_initialized()


@pytest.mark.parametrize("meeting", ["address", "file"])
def test_two_nodes_on_one_host_find_each_other(tmp_path, meeting):
    at_address = {"master_addr": "127.0.0.1", "master_port": str(free_port())}
    where = at_address if meeting == "address" else {"init_method": f"file://{tmp_path}/meeting"}
    told_at = tmp_path / "told"
    told_at.mkdir()
    options = {"nproc_per_node": 2, "nnodes": 2, "join": False, **where}
    nodes = [start("gloo", tell, (str(told_at),), node_rank=node, **options) for node in (0, 1)]
    assert [node.join() for node in nodes] == [True, True]
    for rank, told in enumerate(told_in(told_at)):
        assert (told["place"], told["nodes"], told["sum"]) == ([rank, rank % 2, 4], [rank // 2, 2, 2], 6)


def test_two_runs_at_once_need_no_port_and_live_when_nobody_holds_them(tmp_path):
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        start("gloo", tell, (str(tmp_path / run),), nproc_per_node=2, join=False)
    wait_until(lambda: all(processes.join(timeout=0.05) for processes in list(launch._running)))
    for run in ("a", "b"):
        assert [told["sum"] for told in told_in(tmp_path / run)] == [1, 1]


def test_debug_mode_reaches_the_processes():
    with pytest.raises(ProcessRaisedException, match="RankDivergenceError: the calls of the ranks differ"):
        start("gloo", in_debug_mode, (), nproc_per_node=2, debug=True)


def test_join_waits_as_long_as_it_is_told(tmp_path):
    processes = start("gloo", hang, (str(tmp_path), "asleep"), nproc_per_node=2, join=False)
    assert processes.join(timeout=0) is False
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    assert processes.join(timeout=0.1) is False
    processes.end()
    assert processes.join() is True
    assert not any(process.is_alive() for process in processes.processes)


def leave_a_child_behind(local_rank, folder):
    if (pid := os.fork()) == 0:
        time.sleep(FOREVER)
    Path(folder, "0 of 1").write_text(str(pid))
    os._exit(3)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_join_does_not_wait_for_what_a_process_leaves_behind(tmp_path, method):
    try:
        with pytest.raises(ProcessExitedException, match="process 0 exited with code 3"):
            idist.spawn("gloo", leave_a_child_behind, (str(tmp_path),), start_method=method)
        assert len(processes_in(tmp_path)) == 1
    finally:
        end_all_in(tmp_path)


def exit_once_told(local_rank, folder):
    wait_until(Path(folder, "told").exists)
    os._exit(3)


def test_a_slow_fork_server_hides_no_exit_code(tmp_path):
    processes = start("gloo", exit_once_told, (str(tmp_path),), join=False)
    server = forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGSTOP)
    resume = threading.Timer(2.0, os.kill, (server, signal.SIGCONT))
    try:
        (tmp_path / "told").touch()
        resume.start()
        with pytest.raises(ProcessExitedException, match="process 0 exited with code 3"):
            processes.join()
    finally:
        os.kill(server, signal.SIGCONT)
        resume.join()


def ignore_the_ends_of_children(folder):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as after `trap '' CHLD`: the system discards exit codes
    options = {"nproc_per_node": 2, "start_method": "fork", "timeout": TIMEOUT}
    idist.spawn("gloo", tell, (folder,), **options)
    with pytest.raises(ProcessRaisedException, match="process 1 failed"):
        idist.spawn("gloo", fail, ("raises",), **options)


def test_spawn_returns_where_exit_codes_are_discarded(tmp_path):
    parent = context.Process(target=ignore_the_ends_of_children, args=(str(tmp_path),))
    parent.start()
    try:
        parent.join(HANG)
        assert parent.exitcode == 0
    finally:
        parent.kill()
        parent.join()
    assert [told["sum"] for told in told_in(tmp_path)] == [1, 1]


def tell_threads_and(local_rank, folder):
    Path(folder, "told").write_text(f"{os.environ.get('CAMSHAFT_TOLD')} {torch.get_num_threads()}")


def test_a_process_of_a_server_has_the_environment_of_the_call(monkeypatch, tmp_path):
    monkeypatch.setenv("CAMSHAFT_TOLD", "first")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    start("gloo", tell_threads_and, (str(tmp_path),))
    assert (tmp_path / "told").read_text() == "first 3"


# --- what goes wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("raises", None, r"process 1 failed:\nTraceback(.|\n)*StubbornError: beginningxxxend"),
        ("exits", 3, r"process 1 exited with code 3:\nTraceback(.|\n)*SystemExit: 3"),
        ("exits at once", 5, "process 1 exited with code 5 without reporting an exception"),
        ("is killed", -9, "process 1 was terminated by SIGKILL"),
    ],
)
@pytest.mark.usefixtures("patience")
def test_the_first_failure_is_told_each_time_and_all_processes_end(how, code, text):
    processes = start("gloo", fail, (how,), nproc_per_node=2, join=False)
    for _ in range(2):
        with pytest.raises(ProcessRaisedException if code is None else ProcessExitedException, match=text) as caught:
            processes.join()
        assert caught.value.error_index == 1
        assert caught.value.__reduce__()[1][2] > 0  # the process id, which older versions of torch call `pid`
        assert getattr(caught.value, "exit_code", None) == code


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), None, "process 1 failed:\n(.|\n)*KeyboardInterrupt"),
        (SystemExit("no data"), 1, "process 1 exited with code 1:\n(.|\n)*SystemExit: no data"),
        (SystemExit(256), 256, "process 1 exited with code 256:"),  # which the system makes 0
    ],
)
def test_whatever_a_process_raises_is_reported_or_if_it_cannot_be_written_printed(tmp_path, capsys, error, code, text):
    work.Failure.of(error, 1, 0.0).save(str(tmp_path))
    (failure,) = work.Failure.all_in(str(tmp_path))
    assert failure.code == code
    assert re.search(text, str(failure.exception()))
    failure.save(str(tmp_path / "gone"))
    message = "process 1 failed, and could not report it to the process that started it: "
    assert re.match(rf"{message}.*\n{re.escape(failure.text)}$", capsys.readouterr().err)


def test_to_exit_well_is_no_failure():
    start("gloo", exit_well, (), nproc_per_node=2)


@pytest.mark.usefixtures("patience")
def test_a_process_that_ends_without_an_error_while_others_wait_for_it_is_named():
    """Other ends are in tests/faults."""
    text = "(has ended with exit code 0|process was killed or crashed)(.|\n)*process 1 had exited with code 0 before"
    with pytest.raises(ProcessRaisedException, match=f"process 0 failed(.|\n)*{text}"):
        start("gloo", leave, (), nproc_per_node=2)


def test_an_error_of_a_signal_handler_during_the_report_is_reported_with_the_first_one():
    killed = RuntimeError("DataLoader worker is killed")  # torch's handler of SIGCHLD raises it, at any moment
    report = mock.Mock(side_effect=[killed, None])
    with pytest.raises(RuntimeError, match="worker is killed"):
        work.run(0, mock.Mock(side_effect=EOFError), None, report)
    assert "EOFError" in report.call_args.args[0].text
    assert "worker is killed" in report.call_args.args[0].text


@pytest.mark.parametrize("is_consequence", [False, True])
def test_a_process_failed_before_the_others_learnt_of_it(monkeypatch, is_consequence):
    learnt, reports = [], []

    def publish(error, backend):
        learnt.append(time.monotonic())
        return RankFailedError("rank 1 failed first") if is_consequence else error

    monkeypatch.setattr(work.failures, "publish", publish)
    with pytest.raises(RankFailedError if is_consequence else ZeroDivisionError):
        work.run(0, lambda: 1 / 0, None, reports.append)
    assert (reports[0].when > learnt[0]) == is_consequence


def test_a_process_that_is_deaf_to_a_request_to_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(work, "GRACE", 0.5)
    with pytest.raises(ProcessRaisedException, match="process 1 failed(.|\n)*ValueError: enough"):
        start("gloo", hang_until_the_other_fails, (str(tmp_path),), nproc_per_node=2)
    (file,) = tmp_path.iterdir()
    assert not outlasting(lambda: is_running(int(file.read_text())))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"backend": "unknown"}, ValueError, "backend must be one of"),
        ({"fn": "print"}, TypeError, "fn must be callable, got 'print'"),
        ({"args": 3}, TypeError, "args must be a tuple, got 3"),
        ({"rank": 0, "world_size": 2}, TypeError, r"\['rank', 'world_size'\] are computed from nproc_per_node"),
        ({"time_out": 3}, TypeError, r"backend 'gloo' got unknown options \['time_out'\]"),
        ({"start_method": "thread"}, ValueError, "cannot find context for 'thread'"),
        ({"nproc_per_node": 0}, ValueError, "nproc_per_node"),
        ({"nnodes": 2}, ValueError, "node_rank must be given"),
    ],
)
def test_what_cannot_be_started_is_refused_before_anything_is(arguments, error, message):
    before = children()
    with pytest.raises(error, match=message):
        idist.spawn(**{"backend": "gloo", "fn": print, "args": (), **arguments})
    assert children() == before
    assert launch._running == set()


def test_a_backend_without_its_devices_is_refused_before_anything_is_started(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(launch, "module_of", lambda name: module_of("gloo"))  # as where torch was built with nccl
    with pytest.raises(RuntimeError, match="backend 'nccl' needs a CUDA device"):
        launch._spawn("nccl", (print, (), {}), 2)


def test_what_cannot_be_pickled_is_told_and_nothing_is_left():
    for fn, args in ((lambda rank: rank, ()), (print, (lambda: 1,))):
        with pytest.raises(TypeError, match="fn and its arguments must be importable and picklable .* got <"):
            start("gloo", fn, args, nproc_per_node=2)
        assert launch._running == set()


def test_a_process_that_cannot_be_started_ends_those_that_were(monkeypatch, tmp_path):
    started, really_start = [], context.Process.start

    def start_one(process):
        if started:
            raise OSError("Cannot allocate memory")
        started.append(process)
        really_start(process)

    monkeypatch.setattr(context.Process, "start", start_one)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        start("gloo", hang, (str(tmp_path), "asleep"), nproc_per_node=2)
    assert [process.is_alive() for process in started] == [False]
    assert launch._running == set()


def test_a_port_that_is_in_use_is_an_error():
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    with pytest.raises(ProcessRaisedException, match=f"(?i)process 0 failed(.|\n)*{store.port}(.|\n)*in use"):
        start("gloo", tell, ("",), nproc_per_node=2, master_port=store.port)


# --- notebooks ---------------------------------------------------------------------------------------------------

SETUP = """
import gc
import torch
import camshaft.distributed as idist
from datetime import timedelta

options = {"nproc_per_node": 2, "start_method": "fork", "timeout": timedelta(seconds=900)}
torch.set_num_threads(2)
data = torch.ones(400, 400)
data @ data
"""
WRONG = """
def training(local_rank):
    idist.barrier()
    if local_rank == 1:
        raise ValueError("no data")
    idist.barrier()

idist.spawn("gloo", training, (), **options)
"""
CORRECTED = """
def training(local_rank):
    gc.collect()
    result = data @ data
    idist.all_reduce(result)
    assert result[0, 0] == 800

idist.spawn("gloo", training, (), **options)
"""


def be_a_notebook(times, outcomes):
    """Run cells as IPython does, which keeps the last error, and report what they raised."""
    namespace = {"__name__": "__main__"}
    for cell in (SETUP, *times * (WRONG, CORRECTED)):
        try:
            exec(compile(cell, "cell", "exec"), namespace)
        except Exception as error:
            sys.last_value = error
            outcomes.send(str(error))
        else:
            outcomes.send(None)


def test_a_cell_that_failed_runs_once_it_is_corrected_however_often():
    outcomes, theirs = context.Pipe(duplex=False)
    notebook = context.Process(target=be_a_notebook, args=(2, theirs))
    notebook.start()
    theirs.close()
    try:
        for error in (None, *2 * ("ValueError: no data", None)):
            assert outcomes.poll(HANG), "it hangs"
            found = outcomes.recv()
            assert found is None if error is None else error in found
    finally:
        notebook.kill()
        notebook.join()
        outcomes.close()


@pytest.mark.usefixtures("patience")
def test_no_store_is_open_when_processes_are_forked_or_once_their_run_has_failed(monkeypatch):
    stores = []

    class Store(dist.TCPStore):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            (run,) = launch._running
            assert len(run.processes) == 2
            stores.append(weakref.ref(self))

    monkeypatch.setattr(launch, "TCPStore", Store)
    gc.disable()  # what a cycle refers to lives on
    try:
        with pytest.raises(ProcessRaisedException) as caught:  # the traceback refers to all that was there
            start("gloo", fail, ("raises",), nproc_per_node=2)
        assert [store() for store in stores] == [None]
    finally:
        gc.enable()
    assert caught.value.error_index == 1


# --- the end of the one who started them -------------------------------------------------------------------------


def be_a_parent(folder, how):
    """Start processes that hang, tell when an interrupt is expected, and write down how that ends."""
    work.GRACE = 1.0  # those that are forked take it over
    processes = idist.spawn("gloo", hang, (folder, how), nproc_per_node=2, start_method="fork", join=False)
    bystander = multiprocessing.get_context("fork").Process(target=time.sleep, args=(FOREVER,))
    bystander.start()  # it inherits what this process holds, as the workers of a loader do
    Path(folder, "bystander").write_text(str(bystander.pid))
    collect = launch.Processes._collect
    launch.Processes._collect = lambda *args: (Path(folder, "joining").touch(), collect(*args))
    try:
        processes.join()
    except BaseException:
        bystander.kill()
        Path(folder, "error").write_text(traceback.format_exc())


@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGTERM, "in a collective"), (signal.SIGKILL, "deaf"), (signal.SIGINT, "deaf")]
)
def test_no_process_outlives_the_one_that_started_it(tmp_path, number, how):
    parent = context.Process(target=be_a_parent, args=(str(tmp_path), how))
    parent.start()
    try:
        wait_until(lambda: len(processes_in(tmp_path)) == 2 and (tmp_path / "joining").exists())
        os.kill(parent.pid, number)
        parent.join(HANG)
        assert parent.exitcode == (0 if number == signal.SIGINT else -number)
        wait_until(lambda: not processes_in(tmp_path))
        if number == signal.SIGINT:
            assert (tmp_path / "error").read_text().endswith("KeyboardInterrupt\n")
    finally:
        parent.kill()
        parent.join()
        end_all_in(tmp_path, "bystander")


def processes_in(folder, *others):
    """List the processes that wrote down who they are, and still run."""
    texts = [file.read_text() for pattern in ("* of *", *others) for file in folder.glob(pattern)]
    return [pid for pid in map(int, filter(None, texts)) if is_running(pid)]


def end_all_in(folder, *others):
    for pid in processes_in(folder, *others):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# --- scripts -----------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import camshaft.distributed as idist

def training(local_rank, text):
    place = idist.get_rank(), idist.get_world_size(), os.environ["OMP_NUM_THREADS"], torch.get_num_threads()
    os.write(1, f"{idist.all_gather(text)} {place}\\n".encode())
    idist.barrier()
    if local_rank == 1:
        raise ValueError("no data")
    idist.barrier()

def hanging(local_rank, folder):
    Path(folder, f"{local_rank} of {os.getppid()}").write_text(str(os.getpid()))
    time.sleep(9000)

if __name__ == "__main__":
    with idist.Parallel("gloo", nproc_per_node=2) as parallel:
        parallel.run(*((hanging, sys.argv[1]) if sys.argv[1:] else (training, "hello")))
"""
GUARD = 'if __name__ == "__main__":\n'
TELLS_WHEN_JOINING = """
    from camshaft.distributed.launch.spawn import Processes
    collect = Processes._collect
    Processes._collect = lambda *args: (Path(sys.argv[1], "joining").touch(), collect(*args))
"""
# as in the middle of a job of Slurm, on one of its nodes: none of it is about the new processes
IN_SLURM = {**batch([2, 2]), "SLURM_STEP_ID": str(0xFFFFFFFB)}  # that of the batch script
UNDER_TORCHRUN = torchrun(3, 1, [2, 2], node=1)


@pytest.fixture
def run_script(tmp_path):
    def run(variables, *arguments, script=SCRIPT):
        (tmp_path / "script.py").write_text(script)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, tmp_path / "script.py", *arguments]
        return subprocess.Popen(command, env=environment(**variables), start_new_session=True, **pipes)

    return run


def environment(**variables):
    """Return the variables of a script whose processes may choose their number of threads."""
    chosen = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return {**chosen, **variables, "PYTHONPATH": str(ROOT)}


@pytest.mark.jobs
def test_a_script_runs_its_processes_whatever_surrounds_it_and_fails_when_they_do(run_script):
    """They compute with their share of the cores, and so does what they import or start."""
    with run_script(IN_SLURM) as script:
        try:
            output, errors = script.communicate(timeout=HANG)
        finally:
            script.kill()
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    expected = [f"['hello', 'hello'] ({rank}, 2, '{share}', {share})" for rank in (0, 1)]
    assert sorted(output.splitlines()) == expected
    assert script.returncode == 1
    assert "process 1 failed" in errors
    assert "ValueError: no data" in errors


def test_a_script_that_is_killed_takes_its_processes_with_it(run_script, tmp_path):
    with run_script({**IN_SLURM, **UNDER_TORCHRUN}, tmp_path) as script:
        try:
            wait_until(lambda: processes_in(tmp_path))
            script.kill()
            wait_until(lambda: not processes_in(tmp_path))
        finally:
            script.kill()
            end_all_in(tmp_path)


@pytest.mark.jobs
def test_an_interrupt_of_all_processes_is_reported_in_one_line(run_script, tmp_path):
    with run_script({}, tmp_path, script=SCRIPT.replace(GUARD, GUARD + TELLS_WHEN_JOINING)) as script:
        try:
            wait_until(lambda: len(processes_in(tmp_path)) == 2 and (tmp_path / "joining").exists())
            os.killpg(script.pid, signal.SIGINT)  # as a terminal does
            _, errors = script.communicate()
        finally:
            script.kill()
            end_all_in(tmp_path)
    assert script.returncode == -signal.SIGINT
    (line,) = errors.splitlines()
    assert line.startswith("KeyboardInterrupt, at ")


@pytest.mark.jobs
def test_a_script_that_is_piped_into_python_runs_its_function():
    script = SCRIPT.replace('raise ValueError("no data")', "pass")
    options = {"env": environment(OMP_NUM_THREADS="1"), "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-"], input=script, **options)
    expected = [f"['hello', 'hello'] ({rank}, 2, '1', 1)" for rank in (0, 1)]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr


@pytest.mark.jobs
def test_a_script_without_a_main_guard_is_told_so_by_name(run_script, tmp_path):
    with run_script({}, script=SCRIPT.replace('__name__ == "__main__"', "True")) as script:
        _, errors = script.communicate()
    assert script.returncode == 1
    said = r"RuntimeError: .*script.py starts processes .* put its main code under if __name__ == '__main__':"
    assert re.fullmatch(said, errors.rstrip().splitlines()[-1])
    assert len(re.findall(said, errors)) == 1, errors


HEALTHY = """
import os, signal, sys, time
from pathlib import Path
import torch
import camshaft.distributed as idist

def meet(local_rank, tensors=()):
    assert idist.all_reduce(1) == 2

def be_preempted(local_rank, folder):
    signal.signal(signal.SIGTERM, lambda *_: None)
    idist.barrier()
    Path(folder, f"ready{local_rank}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    meet(local_rank)

parallel = idist.Parallel("gloo", nproc_per_node=2)  # which starts nothing yet

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with parallel:
        parallel.run(meet, [torch.ones(1) for _ in range(300)])
    if sys.argv[2] != "short":
        sys.exit()
    signal.signal(signal.SIGTERM, lambda *_: None)
    processes = idist.spawn("gloo", be_preempted, (folder,), nproc_per_node=2, join=False)
    while len(list(folder.glob("ready*"))) < 2:
        time.sleep(0.01)
    os.killpg(0, signal.SIGTERM)
    time.sleep(0.5)
    (folder / "go").touch()
    processes.join()
    if (pid := os.fork()) == 0:
        idist.spawn("gloo", meet, (), nproc_per_node=2)
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.jobs
@pytest.mark.parametrize("folder", ["short", "long" * 25])  # a fork server needs a socket, whose path is limited
def test_what_a_fork_server_cannot_do_or_could_not_outlive_works_nevertheless(run_script, tmp_path, folder):
    """Many shared tensors, a request to end that all processes handle, a child, and a long path."""
    (tmp_path / folder).mkdir()
    with run_script({"TMPDIR": str(tmp_path / folder)}, tmp_path, folder, script=HEALTHY) as script:
        try:
            _, errors = script.communicate(timeout=HANG)
        finally:
            script.kill()
    assert (script.returncode, errors) == (0, "")


def close_its_pipes_and_wait(local_rank, folder):
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # that of the list itself is closed
            if number > 2 and os.readlink(f"/proc/self/fd/{number}").startswith("pipe:"):
                os.close(number)
    Path(folder, "0 of 1").write_text(str(os.getpid()))
    time.sleep(FOREVER)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_process_that_closes_what_it_did_not_open_has_not_ended(tmp_path, method):
    arguments = {"start_method": method, "timeout": TIMEOUT, "join": False}
    processes = idist.spawn("gloo", close_its_pipes_and_wait, (str(tmp_path),), **arguments)
    wait_until(lambda: processes_in(tmp_path))
    assert processes.join(timeout=0.1) is False
    processes.end()
    assert not processes_in(tmp_path)
