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
    "5.1": ("minisgl.stage5.prefill:PrefillAdder._find_room",),
    "5.2": (
        "minisgl.stage5.policies:Mixed.compose",
        "minisgl.stage5.prefill:PrefillAdder._cut",
    ),
    "5.3": (
        "minisgl.stage5.decode:DecodeManager.runnable",
        "minisgl.stage5.decode:DecodeManager.schedule",
    ),
    "5.4": ("minisgl.stage5.scheduler:Scheduler._commit",),
    "5.5": ("minisgl.stage5.scheduler:Scheduler._make_room",),
    "6.1": (
        "minisgl.layers.shard:RankHeads.kv",
        "minisgl.layers.shard:RankHeads.q",
    ),
    "6.2": (
        "minisgl.models.weights:Piece.read",
        "minisgl.models.weights:ReadingPlan.parts",
    ),
    "6.3": ("minisgl.layers.linear:LinearRowParallel.forward",),
    "6.4": ("minisgl.layers.embedding:VocabParallelEmbedding.forward",),
    "6.5": ("minisgl.stage6.communicators:DistributedCommunicator.all_gather",),
    "6.6": ("minisgl.stage6.inbox:LockStepInbox.receive",),
    "7.1": ("minisgl.stage7.llm:LLM.overlap_loop",),
    "7.2": ("minisgl.stage5.scheduler:Scheduler._write_tuple",),
    "7.3": (
        "minisgl.stage5.scheduler:Scheduler.abort",
        "minisgl.stage5.scheduler:Scheduler._release_if_idle",
    ),
    "7.4": (
        "minisgl.stage7.graph_runner:GraphRunner.pad",
        "minisgl.stage7.graph_runner:GraphRunner.can_run",
    ),
    "7.5": ("minisgl.stage7.graph_runner:GraphRunner.replay",),
    "8.1": (
        "minisgl.stage8.codec:MessageDecoder.decode",
        "minisgl.stage8.codec:MessageDecoder.decode_all",
    ),
    "8.2": (
        "minisgl.core.detokenizer:IncrementalDetokenizer.add",
        "minisgl.core.detokenizer:IncrementalDetokenizer.finish",
    ),
    "8.3": (
        "minisgl.stage8.stop_strings:StopStrings.end",
        "minisgl.stage8.stop_strings:StopStrings.take",
    ),
    "8.4": (
        "minisgl.stage8.ask:Ask.put",
        "minisgl.stage8.frontend:Frontend._route",
    ),
    "8.5": (
        "minisgl.stage8.ask:Ask.close",
        "minisgl.stage8.frontend:Frontend.abort",
    ),
}
