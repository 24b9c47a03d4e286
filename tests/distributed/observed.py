"""What one process of a run sees: the variables that launchers were seen to set, and the devices of its machine."""

from __future__ import annotations

import pytest
import torch


def see(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int) -> None:
    """Let torch see so many devices of a kind, none of which is there."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind and torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def torchrun(rank, local_rank, workers, node=0, **more):
    """`torchrun`; `workers` holds their number on each node."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(sum(workers)),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(workers[node]),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(workers)),
        "ROLE_RANK": str(rank),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29611",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **more,
    }


def by_hand(rank, local_rank, world_size, **more):
    return {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(world_size), **more}


def rendezvous(rank, local_rank, world_size):
    return by_hand(rank, local_rank, world_size, MASTER_ADDR="10.0.0.9", MASTER_PORT="4000")


def step(rank, local_rank, tasks, node=0, **more):
    """`srun`; `tasks` holds their number on each node, and of these nodes the job has all."""
    tasks_per_node = ",".join(map(str, tasks))
    nodes = f"n[1-{len(tasks)}]"
    return {
        **job(tasks),
        "SLURMD_NODENAME": f"n{node + 1}",
        "SLURM_GTIDS": ",".join(str(sum(tasks[:node]) + task) for task in range(tasks[node])),
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": str(len(tasks)),
        "SLURM_STEP_NUM_TASKS": str(sum(tasks)),
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        **more,
    }


def job(tasks):
    """`salloc`"""
    return {
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NODELIST": f"n[1-{len(tasks)}]",
        "SLURM_JOB_NUM_NODES": str(len(tasks)),
        "SLURM_NTASKS": str(sum(tasks)),
        "SLURM_TASKS_PER_NODE": ",".join(map(str, tasks)),
    }


def batch(tasks):
    """A script under `sbatch`."""
    return {
        **job(tasks),
        "SLURMD_NODENAME": "n1",
        "SLURM_GTIDS": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
    }


def open_mpi(rank, world_size, local_rank, local_world_size):
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(world_size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_world_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(local_rank),
        "PMIX_RANK": str(rank),
        "PMIX_HOSTNAME": "vm",
    }


def mpich(rank, world_size, local_rank, local_world_size):
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(world_size),
        "MPI_LOCALRANKID": str(local_rank),
        "MPI_LOCALNRANKS": str(local_world_size),
        "PMI_FD": "9",
        "PMI_HOSTNAME": "vm",
    }


def horovod(rank, world_size, local_rank, local_world_size, node, num_nodes):
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(world_size),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(local_world_size),
        "HOROVOD_CROSS_RANK": str(node),
        "HOROVOD_CROSS_SIZE": str(num_nodes),
        "HOROVOD_HOSTNAME": "vm",
        "HOROVOD_CONTROLLER": "gloo",
    }
