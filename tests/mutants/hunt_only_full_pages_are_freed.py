"""Bug 4: the last page of a request, which is rarely full, is never given back."""

from __future__ import annotations

from minisgl.core.req import Req
from minisgl.stage3.llm import LLM


class MyLLM(LLM):
    def _free(self, req: Req) -> None:
        full = req.cached_len // self.table.page_size * self.table.page_size
        pages = self.table.pages(req.table_idx, 0, full)
        self.allocator.free(pages)
        req.cached_len = 0
        if self.tracer.enabled:
            self.table.trace_row(self.tracer, req, 0, 0)
            self.tracer.instant("free_pages", "cache", pages=pages.tolist())
