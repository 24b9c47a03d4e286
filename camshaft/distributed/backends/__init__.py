"""What moves tensors between ranks, one file or package a backend."""
