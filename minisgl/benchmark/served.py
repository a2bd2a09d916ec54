"""The server that is measured: ours, started for it, or one that runs already. Measures nothing."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

from minisgl.benchmark.http_load import Server
from minisgl.benchmark.stages import ready_port
from minisgl.benchmark.target import Target

SECONDS = 30  # for what is no generation


@contextlib.asynccontextmanager
async def served(args: argparse.Namespace, subject: Target) -> AsyncIterator[Server]:
    """That of --url, or ours with the settings of the subject, ended at the end."""
    if args.url:
        url = urllib.parse.urlsplit(args.url)
        if url.scheme != "http" or not url.hostname:
            raise ValueError(f"--url must be like http://127.0.0.1:30000, not {args.url!r:.200}")
        yield Server(url.hostname, url.port or 80, args.api_key)
        return
    flags = [*subject.but(port=0).flags, "--served-model-name", subject.name]
    command = [sys.executable, "-m", "minisgl.stage8", *flags]
    print(f"starting the server: {' '.join(command[1:])} ...", file=sys.stderr, flush=True)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        yield Server("127.0.0.1", await ready_port(process), args.api_key)
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 60)


def model_card(server: Server) -> dict[str, Any]:
    """Of the first model that it lists: "id", and of most servers "max_model_len", tokens of prompt and answer."""
    return json.loads(_ask(server, "GET", "/v1/models"))["data"][0]


def flush_cache(server: Server) -> None:
    """Forget all prefixes. Raises OSError when the server does not: not all have this."""
    _ask(server, "POST", "/flush_cache")


def _ask(server: Server, method: str, path: str) -> bytes:
    request = urllib.request.Request(f"http://{server.host}:{server.port}{path}", method=method)
    if server.api_key:
        request.add_header("Authorization", f"Bearer {server.api_key}")
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        return response.read()
