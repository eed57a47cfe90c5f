"""Hold the layouts: one file each, which ``qtensor.checkpoints.layout.layouts`` imports."""
