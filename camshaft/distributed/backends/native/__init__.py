"""The backends of torch.distributed: gloo, nccl, and what is registered with torch for other devices."""
