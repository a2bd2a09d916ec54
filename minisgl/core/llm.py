"""The face every stage shows its user: prompts in, text out. Knows nothing of how tokens are made.

A stage's `LLM` adds two methods: `_start`, which builds its parts, and `_run`, which is its loop.
"""

from __future__ import annotations

import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, ClassVar

from minisgl.core.config import Config, make_config
from minisgl.core.detokenizer import IncrementalDetokenizer
from minisgl.core.garbage import spared
from minisgl.core.outputs import Chunk, Completion, TokenOutput
from minisgl.core.prompts import Params, Prompts, check_prompt, pairs
from minisgl.core.sampling_params import MAX_SEED, SamplingParams
from minisgl.core.tokenizer import Tokenizer
from minisgl.core.trace import Tracer, merge
from minisgl.models.config import ModelConfig
from minisgl.models.resolve import resolve_model


@dataclass(frozen=True)
class Request:
    """A prompt, validated and encoded, with a seed of its own."""

    uid: int
    prompt_ids: list[int]
    sampling_params: SamplingParams


class BaseLLM(ABC):
    """`with LLM("smollm2-135m") as llm: llm.generate("Hello")`. One `generate` or `stream` at a time."""

    config_class: ClassVar[type[Config]] = Config
    gives_logprobs: ClassVar[bool] = False

    def __init__(self, model: str = "smollm2-135m", **options: Any) -> None:
        self.config = make_config(self.config_class, {"model": model, **options})
        self.folder = resolve_model(model, self.config.model_source)
        self.model_config = ModelConfig.from_folder(self.folder)
        self.max_seq_len = check_max_seq_len(self.config, self.model_config)
        self.tokenizer = Tokenizer.from_folder(self.folder)
        self.tracer = Tracer(self.config.trace)
        self._seeds = random.Random(self.config.seed)
        self._next_uid = 0
        self._open: Generator[TokenOutput, None, None] | None = None
        self._closed = False
        self._kept = set(vars(self))
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _start(self) -> None:
        """Build the parts of this stage. `_stop` is called after it, also when it raised."""

    @abstractmethod
    def _run(self, requests: list[Request]) -> Generator[TokenOutput, None, None]:
        """The loop of this stage. Closing the generator aborts what is unfinished and frees all it holds."""

    def _stop(self) -> None:  # noqa: B027 (most stages have nothing to undo)
        """Undo `_start`, however far it came."""

    def stats(self) -> dict[str, int]:
        """Counters a stage wants shown after a run: pages, hits."""
        return {}

    def generate(self, prompts: Prompts, sampling_params: Params = None) -> list[Completion]:
        """Completions in the order of the prompts. Raises ValueError before anything runs if one is invalid."""
        requests = self._requests(prompts, sampling_params)
        made: list[list[TokenOutput]] = [[] for _ in requests]
        completions: dict[int, Completion] = {}
        with closing(self._exclusive(requests)) as outputs:
            for output in outputs:
                index = output.uid - requests[0].uid
                made[index].append(output)
                if output.finish_reason:  # now, while the device computes for others, and not when all have ended
                    completions[index] = self._completion(requests[index], made[index])
        lost = [request.uid for index, request in enumerate(requests) if index not in completions]
        if lost:
            raise RuntimeError(f"requests {lost[:8]} ended without their last token: this is a bug in the stage")
        return [completions[index] for index in range(len(requests))]

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> Generator[Chunk, None, None]:
        """Chunks as they are made, those of several prompts interleaved. Closing the iterator aborts the rest."""
        return self._stream(self._requests(prompts, sampling_params))

    def close(self) -> None:
        """Free everything: what `_start` has made is gone after it. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._open is not None:
            self._open.close()
        self._stop()
        for name in set(vars(self)) - self._kept:  # a GPU's memory too: the variable of a `with` outlives it
            delattr(self, name)
        if "torch" in sys.modules:  # who leaves the computing to other processes has not loaded it
            from minisgl.kernel.device import release_memory

            release_memory()
        self.tracer.close()
        if self.config.trace is not None:
            merge(self.config.trace)

    def __enter__(self) -> BaseLLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _stream(self, requests: list[Request]) -> Generator[Chunk, None, None]:
        texts = [IncrementalDetokenizer(self.tokenizer) for _ in requests]
        with closing(self._exclusive(requests)) as outputs:
            for output in outputs:
                index = output.uid - requests[0].uid
                text = self._text_of(texts[index], output)
                ids = [] if output.token_id is None else [output.token_id]
                yield Chunk(index, text, ids, output.finish_reason)

    def _text_of(self, text: IncrementalDetokenizer, output: TokenOutput) -> str:
        """An end-of-sequence token is in the ids and not in the text."""
        piece = ""
        if output.token_id is not None and output.finish_reason != "stop":
            piece = text.add(output.token_id)
        return piece + text.finish() if output.finish_reason else piece

    def _exclusive(self, requests: list[Request]) -> Generator[TokenOutput, None, None]:
        """`_run`, but only one at a time."""
        self._check_open()
        if self._open is not None:
            raise RuntimeError("a generate or stream of this LLM is still open: finish or close it first")
        self._open = self._run(requests)
        try:
            with spared():
                yield from self._open
        finally:
            self._open.close()
            self._open = None

    def _completion(self, request: Request, outputs: list[TokenOutput]) -> Completion:
        reason = outputs[-1].finish_reason
        assert reason is not None  # generate saw it
        token_ids = [output.token_id for output in outputs if output.token_id is not None]
        text = self.tokenizer.decode(token_ids[:-1] if reason == "stop" else token_ids)
        logprobs = [output.logprob for output in outputs if output.logprob is not None]
        return Completion(
            text,
            token_ids,
            reason,
            len(request.prompt_ids),
            outputs[-1].cached_tokens,
            logprobs if request.sampling_params.logprobs is not None else None,
            outputs[0].prompt_logprobs,
        )

    def _requests(self, prompts: Prompts, sampling_params: Params) -> list[Request]:
        self._check_open()
        checked = [self._check(prompt, params) for prompt, params in pairs(prompts, sampling_params)]
        first, self._next_uid = self._next_uid, self._next_uid + len(checked)
        return [Request(first + i, ids, self._with_seed(params)) for i, (ids, params) in enumerate(checked)]

    def _check_open(self) -> None:
        """Raises RuntimeError when what `_start` has made is gone."""
        if self._closed:
            raise RuntimeError("this LLM is closed: make a new one")

    def _check(self, prompt: str | Sequence[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        if params.logprobs is not None and not self.gives_logprobs:
            raise ValueError("logprobs are given by stages 5 to 8, not by this one: leave them out")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        check_prompt(ids, params, self.model_config.vocab_size, self.max_seq_len)
        return ids, params

    def _with_seed(self, params: SamplingParams) -> SamplingParams:
        if params.is_greedy or params.seed is not None:
            return params
        return replace(params, seed=self._seeds.randint(0, MAX_SEED))


def check_max_seq_len(config: Config, model_config: ModelConfig) -> int:
    """The longest sequence in tokens. Raises ValueError when the model cannot be asked for as much."""
    limit = model_config.max_position
    wanted = limit if config.max_seq_len is None else config.max_seq_len
    if wanted > limit:
        raise ValueError(f"--max-seq-len {wanted} is more than the {limit} positions of this model: give at most that")
    return wanted
