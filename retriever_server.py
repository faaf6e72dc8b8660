"""The retriever as a service, wire-compatible with Search-R1's `retrieval_server.py`.

    python retriever_server.py --index indexes/e5 --corpus wiki-18.jsonl           # or --config configs/run.yaml
    curl -d '{"queries": ["Who wrote Hamlet?"], "topk": 3, "return_scores": true}' -H 'Content-Type: application/json' 127.0.0.1:8000/retrieve

POST /retrieve {"queries": [str, …], "topk": int | null, "return_scores": bool}
  → {"result": [[{"document": {"id", "contents"}, "score"}, …], …]}, or bare documents where return_scores is false.
GET /health → {"status", "corpus_size", "backend", "encoder"}.
"""

import argparse
import dataclasses

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, field_validator

from lld import config
from lld.retrieval import open_retriever


class Query(BaseModel):
    """The body of POST /retrieve; a `topk` of null means the server's own."""

    queries: list[str]
    topk: int | None = Field(default=None, gt=0)
    return_scores: bool = False

    @field_validator("queries")
    @classmethod
    def are_unicode(cls, queries: list[str]) -> list[str]:
        if any("\ud800" <= letter <= "\udfff" for query in queries for letter in query):
            raise ValueError("a lone surrogate is no text")  # tokenizers would fail on it, which is a 500
        return queries


def make_app(retriever, topk: int) -> FastAPI:
    """The web application around an opened retriever; `topk` is used where a request names none."""
    app = FastAPI(title="lld retriever")

    @app.exception_handler(RequestValidationError)
    def refuse(request: Request, error: RequestValidationError) -> JSONResponse:
        # FastAPI's own reply quotes the input, and fails with 500 where that is NaN or a lone surrogate
        reasons = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        return JSONResponse({"detail": reasons.encode("utf-8", "replace").decode()}, status_code=422)

    @app.post("/retrieve")
    def retrieve(query: Query) -> dict:
        hits = retriever.search(query.queries, query.topk or topk)
        document = lambda passage: {"id": passage.id, "contents": passage.contents}
        if query.return_scores:
            return {"result": [[{"document": document(passage), "score": passage.score} for passage in passages] for passages in hits]}
        return {"result": [[document(passage) for passage in passages] for passages in hits]}

    @app.get("/health")
    def health() -> dict:
        encoder = retriever.encoder.name if retriever.encoder else None
        return {"status": "ok", "corpus_size": len(retriever.corpus), "backend": retriever.backend, "encoder": encoder}

    return app


def parse_options(arguments: list[str] | None = None) -> tuple[config.Retriever, str, int]:
    """Retriever options, host and port from the command line; an option given there beats the one in --config."""
    parser = argparse.ArgumentParser(description="Serve a search index over HTTP, as Search-R1's retrieval server does.")
    parser.add_argument("--config", help="YAML whose retriever section gives what the options below do not")
    parser.add_argument("--index", help="folder made by `python -m lld.retrieval build`, or a FAISS file")
    parser.add_argument("--corpus", help='jsonl or jsonl.gz of {"id", "contents"}')
    parser.add_argument("--encoder", help=f"hub name or folder (default {config.Retriever.encoder})")
    parser.add_argument("--backend", choices=("faiss", "torch", "bm25"), help=f"default {config.Retriever.backend}")
    parser.add_argument("--topk", type=int, help=f"passages a query where a request names no topk (default {config.Retriever.topk})")
    parser.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1; 0.0.0.0 serves other machines too")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args(arguments)
    given = {name: getattr(args, name) for name in ("index", "corpus", "encoder", "backend", "topk") if getattr(args, name) is not None}
    if given.get("topk", 1) < 1:
        raise ValueError(f"--topk {args.topk}: must be 1 or more")
    options = config.load(args.config).retriever if args.config else config.Retriever()
    return dataclasses.replace(options, **given), args.host, args.port


def main() -> None:
    try:
        options, host, port = parse_options()
        retriever = open_retriever(options)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{len(retriever.corpus):,} passages, backend {retriever.backend}", flush=True)
    uvicorn.run(make_app(retriever, options.topk), host=host, port=port, log_level="warning")


if __name__ == "__main__":
    main()
