"""Fast kernels beside ``reference/``, with the same bytes: native code for CPUs, Triton for GPUs."""
