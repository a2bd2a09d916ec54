"""Stage 6: tensor parallelism. A model is cut over several processes that take every step together."""
