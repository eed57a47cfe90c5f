"""Native CPU kernels: C++ sources, how they are built, and their C interface."""
