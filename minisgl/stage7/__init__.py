"""Stage 7: the host and the device work at the same time, and a decode step is launched as one graph."""
