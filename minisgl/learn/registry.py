"""Which methods are which exercise. Knows nothing else.

Generated from the package by `python -m minisgl.learn generate`: a change here is lost.
"""

PLACES: dict[str, tuple[str, ...]] = {
    "1.1": ("minisgl.layers.norm:RMSNorm.forward",),
    "1.2": ("minisgl.layers.rotary:Rotation.apply",),
    "1.3": ("minisgl.attention.recompute:RecomputeAttention.attend",),
    "1.4": (
        "minisgl.sampling.filters:TokenFilters.top_k_threshold",
        "minisgl.sampling.filters:TokenFilters.top_p_threshold",
    ),
    "1.5": ("minisgl.stage1.llm:LLM._run",),
}
