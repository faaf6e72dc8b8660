"""The retriever's web application: routes, replies, limits on requests and connections.

retriever_server.py starts it and documents the wire format.
"""

import asyncio
import dataclasses
import json
import time
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, field_validator
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from lld.tools import Passage

# Requests of the largest allowed size that are answered in parallel; beyond that the reply is 429.
REQUESTS = 4
# Request bodies of the largest allowed size that are held in memory while they arrive.
BODIES = 16
HINT = {
    "service": "a retriever of lld",
    "POST": '/retrieve {"queries": ["Who wrote Hamlet?"], "topk": 3, "return_scores": true}',
    "GET": "/health, /stats",
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of requests and connections. Search-R1's rollout sends 2,560 queries with topk 3 in one body."""

    queries: int = 8192
    topk: int = 1000
    passages: int = 65_536  # queries x topk
    body_mb: float = 16.0
    # Seconds for the headers to arrive, for the body, and for the client to read more of the reply.
    request_s: float = 30.0
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
            # The tokenizer would raise later, and the reply would be 500.
            raise ValueError("a lone surrogate is no text") from None
        return queries


class BodyLimit:
    """ASGI middleware that reads the whole body, within `max_bytes` and `seconds`.

    The reply is 413 to a longer body, without reading the rest, and 408 to a slower one. All bodies that are
    arriving may take BODIES x max_bytes together; a request that exceeds this gets 429.
    """

    def __init__(self, app, max_bytes: float, seconds: float):
        self.app, self.max_bytes, self.seconds = app, max_bytes, seconds
        self.held = 0  # bytes of bodies that are arriving

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body, refusal = await self._read(scope, receive)
        if refusal is not None:
            status, reason = refusal
            reply = JSONResponse({"detail": reason}, status_code=status, headers={"Connection": "close"})
            return await reply(scope, receive, send)
        if body is None:
            return
        whole = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay():
            return next(whole, None) or await receive()

        await self.app(scope, replay, send)

    async def _read(self, scope, receive) -> tuple[bytes | None, tuple[int, str] | None]:
        """(body, None), or (None, (status, reason)) if refused; (None, None) if the client disconnected."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        size = int(declared) if declared.isdigit() and int(declared) > self.max_bytes else 0
        pieces, more = [], True
        end = time.monotonic() + self.seconds
        try:
            while more and size <= self.max_bytes:
                message = await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
                if message["type"] != "http.request":
                    return None, None
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                self.held += len(pieces[-1])
                more = message.get("more_body", False)
                if self.held > BODIES * self.max_bytes:
                    reason = f"more than {BODIES} bodies of the largest size are arriving; ask again later"
                    return None, (429, reason)
        except TimeoutError:
            return None, (408, f"no whole body within {self.seconds:g} s (--request-s)")
        finally:
            self.held -= sum(map(len, pieces))
        if size > self.max_bytes:
            return None, (413, f"a body of more than {self.max_bytes:.0f} bytes (--max-body-mb)")
        return b"".join(pieces), None


def guarded_protocol(limits: Limits) -> type:
    """A subclass of `GuardedProtocol` with these limits; uvicorn needs a class."""
    return type("Guarded", (GuardedProtocol,), {"limits": limits})


class GuardedProtocol(AutoHTTPProtocol):
    """uvicorn's HTTP protocol with a limit on connections and deadlines for headers and for reading a reply.

    uvicorn's limit_concurrency closes no connection, and its keep-alive timeout ends at the first byte of a
    request.
    """

    limits: Limits
    timer = None  # of the current deadline
    left = None  # unread reply bytes when it was set

    def connection_made(self, transport):
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            transport.write(too_many_connections(self.limits.connections))
            transport.close()
        else:
            self._arm(self._late)

    def data_received(self, data):
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            # The headers have arrived; BodyLimit has a deadline for the body.
            self._disarm()
        elif self.timer is None:
            self._arm(self._late)

    def pause_writing(self):
        # Called when the reply is larger than the transport's write buffer.
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
        self.timer = self.loop.call_later(self.limits.request_s, late)

    def _disarm(self):
        if self.timer is not None:
            self.timer.cancel()
        self.timer = None

    def _late(self):
        self.timer = None
        self.transport.close()

    def _unread(self):
        self.timer = None
        before, self.left = self.left, self.transport.get_write_buffer_size()
        if self.left < before:
            self._arm(self._unread)
        else:
            self.transport.abort()


def too_many_connections(most: int) -> bytes:
    """The bytes of a complete 503 reply, sent before any request arrives."""
    body = json.dumps({"detail": f"{most} connections are open already (--max-connections)"}).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable",
        "Content-Type: application/json",
        "Connection: close",
        "Retry-After: 1",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join((*head, "", "")).encode() + body


def encode_result(hits: list[list[Passage]], return_scores: bool) -> bytes:
    """The JSON of a reply. FastAPI's own encoder takes longer than the search."""

    def entry(passage: Passage) -> dict:
        document = {"id": passage.id, "contents": passage.contents}
        return {"document": document, "score": passage.score} if return_scores else document

    return json.dumps({"result": [[entry(passage) for passage in passages] for passages in hits]}).encode()


def check_query(query: Query, topk: int, limits: Limits) -> str | None:
    """The limit that a request exceeds, and the remedy; None if it is within all limits."""
    num_queries = len(query.queries)
    for name, asked, most, option in (
        ("queries", num_queries, limits.queries, "queries"),
        ("topk", topk, limits.topk, "topk"),
        ("queries x topk", num_queries * topk, limits.passages, "passages"),
    ):
        if asked > most:
            asked = "that many" if asked > 10**9 else asked
            return (
                f"body.{name}: {asked} asked for, at most {most} are answered; "
                f"ask for less, or start the server with a higher --max-{option}"
            )
    return None


def refuse(request: Request, error: RequestValidationError) -> JSONResponse:
    """The reply to a body of another shape.

    FastAPI's own reply quotes the input, and fails with 500 if that is NaN or a lone surrogate.
    """
    reasons = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
    return JSONResponse({"detail": reasons.encode("utf-8", "replace").decode()}, status_code=422)


def health_of(retriever) -> dict:
    return {
        "status": "ok",
        "corpus_size": len(retriever.corpus),
        "backend": retriever.backend,
        "encoder": retriever.encoder.name if retriever.encoder else None,
        "fingerprint": retriever.fingerprint,
    }


def make_app(retriever, topk: int, limits: Limits = Limits(), **batching) -> FastAPI:
    """The web application around an opened retriever.

    topk: for requests without one; batching: arguments of `Batcher`.
    """
    from lld.retrieval.batching import Batcher, Busy  # imports torch

    batcher = Batcher(retriever, max_passages=REQUESTS * limits.passages, **batching)

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        yield
        await batcher.close()

    app = FastAPI(title="lld retriever", lifespan=lifespan)
    app.add_middleware(BodyLimit, max_bytes=limits.body_mb * 1e6, seconds=limits.request_s)
    app.add_exception_handler(RequestValidationError, refuse)

    @app.post("/retrieve")
    async def retrieve(query: Query) -> Response:
        wanted = query.topk or topk
        refusal = check_query(query, wanted, limits)
        if refusal is not None:
            return JSONResponse({"detail": refusal}, status_code=422)
        try:
            hits = await batcher.search(query.queries, wanted)
        except Busy as error:
            detail = {"detail": f"{error}; ask again later"}
            return JSONResponse(detail, status_code=429, headers={"Retry-After": "1"})
        return Response(encode_result(hits, query.return_scores), media_type="application/json")

    @app.get("/")
    async def root() -> dict:
        return HINT

    @app.get("/health")
    def health() -> dict:
        return health_of(retriever)

    @app.get("/stats")
    async def stats() -> dict:
        return batcher.stats()

    return app
