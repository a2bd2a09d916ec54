"""Stage 4: prefix cache. A radix tree remembers which pages hold which prefix, so that no prefix is computed twice."""
