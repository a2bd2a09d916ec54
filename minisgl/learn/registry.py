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
    "2.1": ("minisgl.stage2.contiguous_cache:ContiguousCache.store",),
    "2.2": (
        "minisgl.attention.contiguous:ContiguousAttention.attend",
        "minisgl.attention.contiguous:ContiguousAttention.causal_mask",
    ),
    "2.3": ("minisgl.stage2.llm:LLM._context",),
    "2.4": ("minisgl.stage2.contiguous_cache:ContiguousCache.bytes_per_token",),
    "3.1": ("minisgl.stage3.page_pool:PageAllocator.allocate",),
    "3.2": ("minisgl.stage3.page_pool:PageAllocator.free",),
    "3.3": ("minisgl.stage3.page_table:PageTable.assign",),
    "3.4": ("minisgl.stage3.page_pool:KVCachePool.store",),
    "3.5": ("minisgl.attention.paged_torch:PagedTorchAttention.gather",),
    "3.6": (
        "minisgl.stage3.page_pool:KVCachePool.page_bytes",
        "minisgl.stage3.page_pool:KVCachePool.pages_in_budget",
    ),
    "4.1": ("minisgl.stage4.radix_cache:RadixCache.walk",),
    "4.2": ("minisgl.stage4.radix_cache:RadixCache.split",),
    "4.3": ("minisgl.stage4.radix_cache:RadixCache.insert_prefix",),
    "4.4": (
        "minisgl.stage4.radix_cache:RadixCache.lock",
        "minisgl.stage4.radix_cache:RadixCache.unlock",
    ),
    "4.5": ("minisgl.stage4.radix_cache:RadixCache.evict",),
}
