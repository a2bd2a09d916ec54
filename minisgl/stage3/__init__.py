"""Stage 3: paged pool. Many requests share one block of memory, page by page, and decode together."""
