"""Backend mpi, through torch.distributed: torch's own where it was built with one, else ours over mpi4py."""
