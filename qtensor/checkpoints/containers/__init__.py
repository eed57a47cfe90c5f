"""Read and write the files that hold checkpoints; a container knows nothing of layouts."""
