"""The retriever as a service, wire-compatible with Search-R1's `retrieval_server.py`.

    python retriever_server.py --index indexes/e5 --corpus wiki-18.jsonl           # or --config
      configs/run.yaml
    curl -d '{"queries": ["Who wrote Hamlet?"], "topk": 3, "return_scores": true}' -H 'Content-Type:
      application/json' 127.0.0.1:8000/retrieve

POST /retrieve {"queries": [str, …], "topk": int | null, "return_scores": bool}
  → {"result": [[{"document": {"id", "contents"}, "score"}, …], …]}, or bare documents where return_scores is
  false. Mistakes of the client are 4xx: 422 for a body of another shape or beyond the limits (a topk of 0
  too, which Search-R1's server takes for null), 413 for one too long, 408 for one too slow, 429 where too
  much is under way; 503 beyond --max-connections.
GET /health → {"status", "corpus_size", "backend", "encoder", "fingerprint"}; GET /stats → queue, batches,
latency, cache.

Requests of many clients are searched for in batches. SIGTERM and Ctrl-C let requests under way end; the exit
code is then 0. PyTorch and FAISS are imported where they are used: a mistaken option or a port in use is told
at once.
"""

import argparse
import asyncio
import dataclasses
import errno
import json
import os
import re
import signal
import socket
import sys
import time
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, field_validator
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from lld import config
from lld import settings as settings_module
from lld.protocol import Passage

GRACE_S = 30  # for requests under way when the server is told to stop
REQUESTS = 4  # of the largest allowed size that are answered side by side; more is told to ask again
REPLY_BYTES = 3000  # a passage of 100 words while it is answered: found, as JSON, on its way (measured)
BODIES = 16  # of the largest allowed size that are held while they arrive
HINT = {
    "service": "a retriever of lld",
    "POST": '/retrieve {"queries": ["Who wrote Hamlet?"], "topk": 3, "return_scores": true}',
    "GET": "/health, /stats",
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a request may ask for at most; Search-R1's rollout sends 2,560 queries with topk 3 in one body."""

    queries: int = 8192
    topk: int = 1000
    passages: int = 65_536  # queries x topk
    body_mb: float = 16.0
    request_s: float = 30.0  # for the headers to arrive, and for the body; without a byte of the reply read
    connections: int = 512


class Query(BaseModel):
    """The body of POST /retrieve; a `topk` of null means the server's own."""

    queries: list[str]
    topk: int | None = Field(default=None, gt=0)
    return_scores: bool = False

    @field_validator("queries")
    @classmethod
    def are_unicode(cls, queries: list[str]) -> list[str]:
        try:
            "".join(queries).encode()
        except UnicodeEncodeError:
            raise ValueError("a lone surrogate is no text") from None  # a tokenizer fails on it: a 500
        return queries


class BodyLimit:
    """ASGI middleware that reads bodies whole, within `max_bytes` and `seconds`.

    Answers 413 to a longer one, without reading the rest, and 408 to a slower one. All bodies that are
    arriving take BODIES x max_bytes at most; whoever would exceed that is told 429.
    """

    def __init__(self, app, max_bytes: float, seconds: float):
        self.app, self.max_bytes, self.seconds, self.held = app, max_bytes, seconds, 0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body, refusal = await self._read(scope, receive)
        if refusal is not None:
            status, reason = refusal
            return await JSONResponse(
                {"detail": reason}, status_code=status, headers={"Connection": "close"}
            )(scope, receive, send)
        if body is None:
            return
        whole = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay():
            return next(whole, None) or await receive()

        await self.app(scope, replay, send)

    async def _read(self, scope, receive) -> tuple[bytes | None, tuple[int, str] | None]:
        """The body, or why it is refused; neither where the client has left."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        pieces, size, more, end = [], 0, True, time.monotonic() + self.seconds
        if declared.isdigit() and int(declared) > self.max_bytes:
            size = int(declared)
        try:
            while more and size <= self.max_bytes:
                message = await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
                if message["type"] != "http.request":
                    return None, None
                pieces.append(message.get("body", b""))
                size, more = size + len(pieces[-1]), message.get("more_body", False)
                self.held += len(pieces[-1])
                if self.held > BODIES * self.max_bytes:
                    return None, (
                        429,
                        f"more than {BODIES} bodies of the largest size are arriving; ask again later",
                    )
        except asyncio.TimeoutError:
            return None, (408, f"no whole body within {self.seconds:g} s (--request-s)")
        finally:
            self.held -= sum(map(len, pieces))
        if size > self.max_bytes:
            return None, (413, f"a body of more than {self.max_bytes:.0f} bytes (--max-body-mb)")
        return b"".join(pieces), None


def guarded_protocol(limits: Limits) -> type:
    """uvicorn's HTTP protocol with deadlines for headers and for the reading of a reply, and a bound on
    connections.

    uvicorn's limit_concurrency closes no connection, and its keep-alive limit ends with a request's first
    byte.
    """

    class Guarded(AutoHTTPProtocol):
        timer = left = None

        def connection_made(self, transport):
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                reason = json.dumps(
                    {"detail": f"{limits.connections} connections are open already (--max-connections)"}
                ).encode()
                transport.write(
                    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: %d\r\n\r\n"
                    % len(reason)
                    + reason
                )
                transport.close()
            else:
                self._arm(self._late)

        def data_received(self, data):
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._disarm()  # the headers are here; the body is BodyLimit's
            elif self.timer is None:
                self._arm(self._late)

        def pause_writing(self):  # the reply is larger than the socket's buffer
            super().pause_writing()
            self.left = self.transport.get_write_buffer_size()
            self._arm(self._unread)

        def resume_writing(self):
            super().resume_writing()
            self._disarm()

        def connection_lost(self, exc):
            self._disarm()
            super().connection_lost(exc)

        def _arm(self, late):
            self._disarm()
            self.timer = self.loop.call_later(limits.request_s, late)

        def _disarm(self):
            if self.timer is not None:
                self.timer.cancel()
            self.timer = None

        def _late(self):
            self.timer = None
            self.transport.close()

        def _unread(self):
            self.timer, before, self.left = None, self.left, self.transport.get_write_buffer_size()
            if self.left < before:
                self._arm(self._unread)
            else:
                self.transport.abort()

    return Guarded


def encode_result(hits: list[list[Passage]], return_scores: bool) -> bytes:
    """The JSON of a reply; FastAPI's own encoder takes longer over it than the search does."""
    document = lambda passage: {"id": passage.id, "contents": passage.contents}
    if return_scores:
        return json.dumps(
            {
                "result": [
                    [{"document": document(passage), "score": passage.score} for passage in passages]
                    for passages in hits
                ]
            }
        ).encode()
    return json.dumps({"result": [[document(passage) for passage in passages] for passages in hits]}).encode()


def make_app(retriever, topk: int, limits: Limits = Limits(), **batching) -> FastAPI:
    """The web application around an opened retriever; `topk` is used where a request names none, `batching`
    goes to Batcher."""

    from lld.retrieval.batching import Batcher, Busy

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        yield
        await batcher.close()

    app, batcher = (
        FastAPI(title="lld retriever", lifespan=lifespan),
        Batcher(retriever, max_passages=REQUESTS * limits.passages, **batching),
    )
    app.add_middleware(BodyLimit, max_bytes=limits.body_mb * 1e6, seconds=limits.request_s)

    @app.exception_handler(RequestValidationError)
    def refuse(request: Request, error: RequestValidationError) -> JSONResponse:
        # FastAPI's own reply quotes the input, and fails with 500 where that is NaN or a lone surrogate
        reasons = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        return JSONResponse({"detail": reasons.encode("utf-8", "replace").decode()}, status_code=422)

    @app.post("/retrieve")
    async def retrieve(query: Query) -> Response:
        wanted = query.topk or topk
        for name, asked, most, option in (
            ("queries", len(query.queries), limits.queries, "queries"),
            ("topk", wanted, limits.topk, "topk"),
            ("queries x topk", len(query.queries) * wanted, limits.passages, "passages"),
        ):
            if asked > most:
                asked = "that many" if asked > 10**9 else asked
                remedy = (
                    f"at most {most} are answered; ask for less, or start the server with a higher "
                    f"--max-{option}"
                )
                return JSONResponse({"detail": f"body.{name}: {asked} asked for, {remedy}"}, status_code=422)
        try:
            hits = await batcher.search(query.queries, wanted)
        except Busy as error:
            return JSONResponse(
                {"detail": f"{error}; ask again later"}, status_code=429, headers={"Retry-After": "1"}
            )
        return Response(encode_result(hits, query.return_scores), media_type="application/json")

    @app.get("/")
    async def root() -> dict:
        return HINT

    @app.get("/health")
    def health() -> dict:
        encoder = retriever.encoder.name if retriever.encoder else None
        return {
            "status": "ok",
            "corpus_size": len(retriever.corpus),
            "backend": retriever.backend,
            "encoder": encoder,
            "fingerprint": retriever.fingerprint,
        }

    @app.get("/stats")
    async def stats() -> dict:
        return batcher.stats()

    return app


def default_searches() -> int:
    """One where there is a GPU; on a CPU one a core, but no more than 4, lest batches get small."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if torch.cuda.is_available() else min(cores, 4)


def parse_options(arguments: list[str] | None = None) -> tuple[config.Retriever, argparse.Namespace]:
    """Retriever options and the server's own from the command line; an option given there beats the one in
    --config."""
    kinds = {field.name: field for field in dataclasses.fields(config.Retriever)}
    parser = argparse.ArgumentParser(
        description="Serve a search index over HTTP, as Search-R1's retrieval server does."
    )
    parser.add_argument("--config", help="YAML whose retriever section gives what the options below do not")
    parser.add_argument("--index", help="folder made by `python -m lld.retrieval build`, or a FAISS file")
    parser.add_argument("--corpus", help='jsonl or jsonl.gz of {"id", "contents"}')
    parser.add_argument("--encoder", help=f"hub name or folder (default {config.Retriever.encoder})")
    for name, kind, about in (
        (
            "backend",
            str,
            "what the index folder was built for, or faiss, torch, bm25, or a control: random, empty, oracle",
        ),
        ("topk", int, "passages a query where a request names no topk"),
        ("dtype", str, "float16 or int8, of backend torch"),
        ("faiss_params", str, 'such as "nprobe=64"'),
        ("rerank", int, "candidates of a FAISS index to score again with the vectors on disk"),
        ("oracle_questions", str, "questions whose answers backend oracle finds"),
        ("device", str, "auto or cpu"),
        ("max_memory_gb", float, "refuse what needs more (default: what is free)"),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, help=f"{about} (default {kinds[name].default!r})"
        )
    parser.add_argument(
        "--host", default="127.0.0.1", help="default 127.0.0.1; 0.0.0.0 serves other machines too"
    )
    parser.add_argument("--port", type=int, default=8000, help="default %(default)s; 0 takes a free one")
    parser.add_argument(
        "--max-queries", type=int, default=Limits.queries, help="a request (default %(default)s)"
    )
    parser.add_argument("--max-topk", type=int, default=Limits.topk, help="default %(default)s")
    parser.add_argument(
        "--max-passages",
        type=int,
        default=Limits.passages,
        help="queries x topk of a request (default %(default)s)",
    )
    parser.add_argument("--max-body-mb", type=float, default=Limits.body_mb, help="default %(default)s")
    parser.add_argument(
        "--max-connections", type=int, default=Limits.connections, help="open at a time (default %(default)s)"
    )
    parser.add_argument(
        "--request-s",
        type=float,
        default=Limits.request_s,
        help="seconds for a request's headers, and for its body, to arrive, and for a reply to be read on "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--max-batch", type=int, default=256, help="queries searched for at once (default %(default)s)"
    )
    parser.add_argument(
        "--max-wait-ms",
        type=float,
        default=5.0,
        help="how long a query may wait for company (default %(default)s)",
    )
    parser.add_argument(
        "--searches",
        type=int,
        help="searches side by side (default: one a core, at most 4, or 1 where there is a GPU)",
    )
    parser.add_argument(
        "--cache-mb",
        type=float,
        default=256.0,
        help="memory for searches remembered; 0 for none (default %(default)s)",
    )
    args = parser.parse_args(arguments)
    if not args.host.strip():
        raise ValueError(
            "--host is empty, which would serve every network (an unset variable?): give 127.0.0.1, or "
            "0.0.0.0 if that is meant"
        )
    for name in (
        "max_queries",
        "max_topk",
        "max_passages",
        "max_body_mb",
        "max_connections",
        "request_s",
        "max_batch",
        "searches",
    ):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} = {getattr(args, name)}: must be greater than 0")
    if not 0 <= args.port < 1 << 16:
        raise ValueError(f"--port = {args.port}: must be from 0 (any free one) to 65535")
    for name in ("max_wait_ms", "cache_mb"):
        if not getattr(args, name) >= 0:
            raise ValueError(f"--{name.replace('_', '-')} = {getattr(args, name)}: must be 0 or more")
    given = {name: getattr(args, name) for name in kinds if getattr(args, name, None) is not None}
    before = settings_module.load(args.config) if args.config else config.Config()
    return settings_module.from_dict(
        settings_module.to_dict(before) | {"retriever": settings_module.to_dict(before)["retriever"] | given}
    ).retriever, args


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address and does not listen yet; ValueError where it cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
    except (OSError, OverflowError, UnicodeError) as error:
        raise ValueError(f"--host {host} --port {port} is no address of this machine ({error})") from None
    bound = socket.socket(family, kind)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _cannot_bind(host, port, error) from None
    return bound


def _cannot_bind(host: str, port: int, error: OSError) -> ValueError:
    remedy = (
        "stop what listens there, or choose another --port"
        if error.errno == errno.EADDRINUSE
        else "choose another --host or --port"
    )
    return ValueError(f"cannot serve on {host} port {port} ({error.strerror}): {remedy}")


def serve(app: FastAPI, bound: socket.socket, limits: Limits) -> None:
    """Answers requests until SIGTERM or Ctrl-C, then those under way."""
    settings = uvicorn.Config(
        app, log_level="warning", http=guarded_protocol(limits), timeout_graceful_shutdown=GRACE_S
    )

    def stopped(*_) -> None:  # uvicorn sends itself the signal once more when all is answered
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stopped)
    uvicorn.Server(settings).run(sockets=[bound])


def start(arguments: list[str] | None = None) -> None:
    """Takes the port, opens the index, serves."""
    options, args = parse_options(arguments)
    limits = Limits(
        queries=args.max_queries,
        topk=args.max_topk,
        passages=args.max_passages,
        body_mb=args.max_body_mb,
        request_s=args.request_s,
        connections=args.max_connections,
    )
    bound = bind(args.host, args.port)  # at once: opening an index may take minutes
    from lld.retrieval import memory
    from lld.retrieval.backends import open_retriever

    own_bytes = args.cache_mb * 1e6 + REQUESTS * limits.passages * REPLY_BYTES + BODIES * limits.body_mb * 1e6
    memory.check_server(own_bytes, options.max_memory_gb)
    retriever = open_retriever(options, own_bytes)
    app = make_app(
        retriever,
        options.topk,
        limits,
        max_batch=args.max_batch,
        max_wait_s=args.max_wait_ms / 1000,
        cache_bytes=args.cache_mb * 1e6,
        num_searches=args.searches or default_searches(),
    )
    try:
        bound.listen(2048)
    except OSError as error:  # another took it in the meantime
        raise _cannot_bind(args.host, args.port, error) from None
    host, port = bound.getsockname()[:2]
    print(
        f"{len(retriever.corpus):,} passages, backend {retriever.backend}, listening on "
        f"http://{f'[{host}]' if ':' in host else host}:{port}",
        flush=True,
    )
    serve(app, bound, limits)


def main() -> None:
    try:
        start()
    except ValueError as error:
        said = re.sub(r"\bretriever\.([a-z_]+)", lambda match: "--" + match[1].replace("_", "-"), str(error))
        print(f"error: {said}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # while the index was opened


if __name__ == "__main__":
    main()
