"""Stage 1: naive generate. Every new token recomputes the whole sequence."""
