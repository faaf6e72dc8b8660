"""The retriever as a service, wire-compatible with Search-R1's `retrieval_server.py`.

    python retriever_server.py --index indexes/e5 --corpus wiki-18.jsonl           # or --config configs/run.yaml
    curl -d '{"queries": ["Who wrote Hamlet?"], "topk": 3, "return_scores": true}' -H 'Content-Type: application/json' 127.0.0.1:8000/retrieve

POST /retrieve {"queries": [str, …], "topk": int | null, "return_scores": bool}
  → {"result": [[{"document": {"id", "contents"}, "score"}, …], …]}, or bare documents where return_scores is false.
  Mistakes of the client are 4xx: 422 for a body of another shape or beyond the limits, 413 for one too long, 429 where too many wait.
GET /health → {"status", "corpus_size", "backend", "encoder", "fingerprint"}; GET /stats → queue, batches, latency, cache.

Requests of many clients are searched for in batches. SIGTERM and Ctrl-C let requests under way end.
"""

import argparse
import dataclasses
import json
import os
from contextlib import asynccontextmanager

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, field_validator

from lld import config
from lld.protocol import Passage
from lld.retrieval import open_retriever
from lld.serving import Batcher, Busy

GRACE_S = 30  # for requests under way when the server is told to stop


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a request may ask for at most; Search-R1's rollout sends 2,560 queries in one body."""

    queries: int = 8192
    topk: int = 1000
    body_mb: float = 16.0


class Query(BaseModel):
    """The body of POST /retrieve; a `topk` of null means the server's own."""

    queries: list[str]
    topk: int | None = Field(default=None, gt=0)
    return_scores: bool = False

    @field_validator("queries")
    @classmethod
    def are_unicode(cls, queries: list[str]) -> list[str]:
        if any("\ud800" <= letter <= "\udfff" for query in queries if not query.isascii() for letter in query):
            raise ValueError("a lone surrogate is no text")  # tokenizers would fail on it, which is a 500
        return queries


class BodyLimit:
    """ASGI middleware that answers 413 to a body of more than `max_bytes`, without reading the rest of it."""

    def __init__(self, app, max_bytes: float):
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        pieces, size, more = [], int(declared) if declared.isdigit() and int(declared) > self.max_bytes else 0, True
        while more and size <= self.max_bytes:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client has left
            pieces.append(message.get("body", b""))
            size, more = size + len(pieces[-1]), message.get("more_body", False)
        if size > self.max_bytes:
            refusal = JSONResponse({"detail": f"a body of more than {self.max_bytes:.0f} bytes"}, status_code=413, headers={"Connection": "close"})
            return await refusal(scope, receive, send)
        whole = iter([{"type": "http.request", "body": b"".join(pieces), "more_body": False}])

        async def replay():
            return next(whole, None) or await receive()

        await self.app(scope, replay, send)


def encode_result(hits: list[list[Passage]], return_scores: bool) -> bytes:
    """The JSON of a reply; FastAPI's own encoder takes longer over it than the search does."""
    document = lambda passage: {"id": passage.id, "contents": passage.contents}
    if return_scores:
        return json.dumps({"result": [[{"document": document(passage), "score": passage.score} for passage in passages] for passages in hits]}).encode()
    return json.dumps({"result": [[document(passage) for passage in passages] for passages in hits]}).encode()


def make_app(retriever, topk: int, limits: Limits = Limits(), **batching) -> FastAPI:
    """The web application around an opened retriever; `topk` is used where a request names none, `batching` goes to Batcher."""

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        yield
        await batcher.close()

    app, batcher = FastAPI(title="lld retriever", lifespan=lifespan), Batcher(retriever, **batching)
    app.add_middleware(BodyLimit, max_bytes=limits.body_mb * 1e6)

    @app.exception_handler(RequestValidationError)
    def refuse(request: Request, error: RequestValidationError) -> JSONResponse:
        # FastAPI's own reply quotes the input, and fails with 500 where that is NaN or a lone surrogate
        reasons = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        return JSONResponse({"detail": reasons.encode("utf-8", "replace").decode()}, status_code=422)

    @app.post("/retrieve")
    async def retrieve(query: Query) -> Response:
        for name, asked, most in (("queries", len(query.queries), limits.queries), ("topk", query.topk or topk, limits.topk)):
            if asked > most:
                return JSONResponse({"detail": f"body.{name}: {'that many' if asked > 10**9 else asked} asked for, at most {most} are answered; start the server with a higher --max-{name}"}, status_code=422)
        try:
            hits = await batcher.search(query.queries, query.topk or topk)
        except Busy as error:
            return JSONResponse({"detail": f"{error}; ask again later"}, status_code=429, headers={"Retry-After": "1"})
        return Response(encode_result(hits, query.return_scores), media_type="application/json")

    @app.get("/health")
    def health() -> dict:
        encoder = retriever.encoder.name if retriever.encoder else None
        return {"status": "ok", "corpus_size": len(retriever.corpus), "backend": retriever.backend, "encoder": encoder, "fingerprint": retriever.fingerprint}

    @app.get("/stats")
    async def stats() -> dict:
        return batcher.stats()

    return app


def default_searches() -> int:
    """One where there is a GPU; on a CPU one a core, but no more than 4, lest batches get small."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if torch.cuda.is_available() else min(cores, 4)


def parse_options(arguments: list[str] | None = None) -> tuple[config.Retriever, argparse.Namespace]:
    """Retriever options and the server's own from the command line; an option given there beats the one in --config."""
    kinds = {field.name: field for field in dataclasses.fields(config.Retriever)}
    parser = argparse.ArgumentParser(description="Serve a search index over HTTP, as Search-R1's retrieval server does.")
    parser.add_argument("--config", help="YAML whose retriever section gives what the options below do not")
    parser.add_argument("--index", help="folder made by `python -m lld.retrieval build`, or a FAISS file")
    parser.add_argument("--corpus", help='jsonl or jsonl.gz of {"id", "contents"}')
    parser.add_argument("--encoder", help=f"hub name or folder (default {config.Retriever.encoder})")
    for name, kind, about in (
        ("backend", str, "faiss, torch, bm25, or a control: random, empty, oracle"), ("topk", int, "passages a query where a request names no topk"), ("dtype", str, "float16 or int8, of backend torch"),
        ("faiss_params", str, 'such as "nprobe=64"'), ("rerank", int, "candidates of a FAISS index to score again with the vectors on disk"),
        ("oracle_questions", str, "questions whose answers backend oracle finds"), ("device", str, "auto or cpu"), ("max_memory_gb", float, "refuse what needs more (default: what is free)"),
    ):  # fmt: skip
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"{about} (default {kinds[name].default!r})")
    parser.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1; 0.0.0.0 serves other machines too")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-queries", type=int, default=Limits.queries, help="a request (default %(default)s)")
    parser.add_argument("--max-topk", type=int, default=Limits.topk, help="default %(default)s")
    parser.add_argument("--max-body-mb", type=float, default=Limits.body_mb, help="default %(default)s")
    parser.add_argument("--max-batch", type=int, default=256, help="queries searched for at once (default %(default)s)")
    parser.add_argument("--max-wait-ms", type=float, default=5.0, help="how long a query may wait for company (default %(default)s)")
    parser.add_argument("--searches", type=int, default=default_searches(), help="searches side by side (default %(default)s here: the cores, at most 4, or 1 where there is a GPU)")
    parser.add_argument("--cache-size", type=int, default=100_000, help="searches remembered; 0 for none (default %(default)s)")
    args = parser.parse_args(arguments)
    given = {name: getattr(args, name) for name in kinds if getattr(args, name, None) is not None}
    before = config.load(args.config) if args.config else config.Config()
    try:
        cfg = config.from_dict(config.to_dict(before) | {"retriever": config.to_dict(before)["retriever"] | given})
    except ValueError as error:
        raise ValueError(str(error).replace("retriever.", "--")) from None
    return cfg.retriever, args


def main() -> None:
    try:
        options, args = parse_options()
        retriever = open_retriever(options)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    app = make_app(
        retriever, options.topk, Limits(args.max_queries, args.max_topk, args.max_body_mb),
        max_batch=args.max_batch, max_wait_s=args.max_wait_ms / 1000, cache_size=args.cache_size, num_searches=args.searches,
    )  # fmt: skip
    print(f"{len(retriever.corpus):,} passages, backend {retriever.backend}, http://{args.host}:{args.port}", flush=True)
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning", timeout_graceful_shutdown=GRACE_S)


if __name__ == "__main__":
    main()
