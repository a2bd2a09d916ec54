"""The same workload through transformers' generate, in a fresh process: JSON on standard output.

The batch is measured with both of its attention implementations, because which one is faster depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from minisgl.benchmark.workload import Workload
from minisgl.kernel.device import resolve_device
from minisgl.models.resolve import resolve_model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    load = Workload()
    found: dict[str, float] = {}
    for attention in ("sdpa", "eager"):
        model: Any = AutoModelForCausalLM.from_pretrained(
            resolve_model("smollm2-135m"), dtype=getattr(torch, args.dtype), attn_implementation=attention
        )
        model.to(resolve_device("auto"))
        generate(model, load.prompts()[:1], 4)  # warm-up
        found[f"one_stream_tok_s_{attention}"] = max(
            generate(model, load.prompts()[:1], load.output_len) for _ in range(3)
        )
        found[f"batch_tok_s_{attention}"] = max(generate(model, load.prompts(), load.output_len) for _ in range(2))
    print(json.dumps(found))


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]], output_len: int) -> float:
    """Output tokens a second, prefill included. All prompts are of one length: nothing is padded."""
    ids = torch.tensor(prompts, device=model.device)
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=output_len,
        max_new_tokens=output_len,
        pad_token_id=2,
    )
    return (out.shape[1] - ids.shape[1]) * len(prompts) / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
