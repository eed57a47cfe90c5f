"""Compile kernels, and keep them in a cache on the user's disk."""
