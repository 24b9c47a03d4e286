"""What moves tensors between ranks, one file a backend."""
