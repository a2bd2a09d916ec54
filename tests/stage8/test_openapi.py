"""The OpenAPI document says what the server does: all of its paths, and nothing that its answers do not have."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_ring import FakeRing
from live_app import answer, live
from test_api import serving

from minisgl.stage8.openapi import ENDPOINTS, openapi_document


def test_the_document_has_all_routes_and_no_other() -> None:
    async def test() -> None:
        async with serving() as server:
            routes = {
                (method.lower(), route.path.replace(":path", ""))
                for route in server.app.routes
                for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
            }
            document = (await server.get("/openapi.json")).json()
        assert {(one.method, one.path) for one in ENDPOINTS} == routes
        assert {(method, path) for path, methods in document["paths"].items() for method in methods} == routes

    asyncio.run(test())


def test_every_reference_leads_somewhere() -> None:
    document = openapi_document("1")

    def references(value: Any) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(references, value))
        if not isinstance(value, dict):
            return set()
        return {value["$ref"]} if "$ref" in value else set().union(*map(references, value.values()))

    found = references(document)
    assert found == {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed")
def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    """Requests made up from the document, right ones and wrong ones: no 5xx, and no status, type or body that the
    document does not have. What it calls wrong may be fine with us: unknown fields are ignored."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance"
    more = "response_schema_conformance,unsupported_method"
    ring = FakeRing(answer)
    with live(ring) as (url, service):
        command = [
            sys.executable,
            "-m",
            "schemathesis.cli",
            "run",
            f"{url}/openapi.json",
            "--checks",
            f"{checks},{more}",
        ]
        options = ["--max-examples", "10", "--generation-deterministic", "--no-color", "--workers", "1"]
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=250, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        assert len(ring.requests) > 20, "some of them were right"
        assert service.frontend is not None
        assert service.frontend.num_open == 0
