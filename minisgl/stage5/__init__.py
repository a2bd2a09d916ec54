"""Stage 5: continuous and chunked batching. Requests join and leave between any two steps."""
