"""Stage 2: KV cache. The prompt is computed once, and then one token a step."""
