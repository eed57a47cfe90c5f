"""Fast kernels beside ``reference/``: native CPU code now, each format's bytes the same as the reference's."""
