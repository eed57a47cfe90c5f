"""Kernels with the bytes of ``qtensor.reference``; which one serves what is decided above them."""
