"""The cells of docs/distributed_matrix.md: what each of two ranks runs and checks."""
