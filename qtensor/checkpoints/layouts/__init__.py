"""Hold the layouts: one file each, which ``qtensor.checkpoints.layout_base.layouts`` imports."""
