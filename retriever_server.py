"""The retriever as a service, wire-compatible with Search-R1's `retrieval_server.py`.

    python retriever_server.py --index indexes/e5 --corpus wiki-18.jsonl   # or --config configs/run.yaml
    curl -d '{"queries": ["Who wrote Hamlet?"], "topk": 3, "return_scores": true}' \\
      -H 'Content-Type: application/json' 127.0.0.1:8000/retrieve

POST /retrieve {"queries": [str, …], "topk": int | null, "return_scores": bool}
  → {"result": [[{"document": {"id", "contents"}, "score"}, …], …]}, or bare documents if return_scores is
  false. Errors: 422 for a body of another shape or beyond the limits (also for a topk of 0, which Search-R1's
  server reads as null), 413 for a body that is too long, 408 for one that is too slow, 429 for too many
  requests in progress, 503 beyond --max-connections.
GET /health → {"status", "corpus_size", "backend", "encoder", "fingerprint"}
GET /stats → queue, batches, latency, cache

The queries of many clients are batched. After SIGTERM or Ctrl-C, requests in progress are answered and the
exit code is 0. PyTorch and FAISS are imported where they are used, so a wrong option or a port in use is
reported at once.
"""

import argparse
import dataclasses
import errno
import os
import re
import signal
import socket
import sys

import uvicorn
from fastapi import FastAPI

from lld import config, settings
from lld.retrieval.service import BODIES, REQUESTS, Limits, guarded_protocol, make_app

GRACE_S = 30  # for requests in progress at SIGTERM or Ctrl-C
# Memory per passage of 100 words in a reply (measured): as object, as JSON and in the send buffer.
REPLY_BYTES = 3000


def default_searches() -> int:
    """1 with a GPU; on a CPU one per core, at most 4, because more would make batches small."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if torch.cuda.is_available() else min(cores, 4)


# Options of config.Retriever on the command line besides --index, --corpus and --encoder: type, help.
RETRIEVER_OPTIONS = {
    "backend": (
        str,
        "what the index folder was built for, or faiss, torch, bm25, or a control: random, empty, oracle",
    ),
    "topk": (int, "passages a query where a request names no topk"),
    "dtype": (str, "float16 or int8, of backend torch"),
    "faiss_params": (str, 'such as "nprobe=64"'),
    "rerank": (int, "candidates of a FAISS index to score again with the vectors on disk"),
    "oracle_questions": (str, "questions whose answers backend oracle finds"),
    "device": (str, "auto or cpu"),
    "max_memory_gb": (float, "refuse what needs more (default: what is free)"),
}
# The server's own: type, default, help.
SERVER_OPTIONS = {
    "host": (str, "127.0.0.1", "default 127.0.0.1; 0.0.0.0 serves other machines too"),
    "port": (int, 8000, "default %(default)s; 0 takes a free one"),
    "max_queries": (int, Limits.queries, "a request (default %(default)s)"),
    "max_topk": (int, Limits.topk, "default %(default)s"),
    "max_passages": (int, Limits.passages, "queries x topk of a request (default %(default)s)"),
    "max_body_mb": (float, Limits.body_mb, "default %(default)s"),
    "max_connections": (int, Limits.connections, "open at a time (default %(default)s)"),
    "request_s": (
        float,
        Limits.request_s,
        "seconds for a request's headers, and for its body, to arrive, and for a reply to be read on "
        "(default %(default)s)",
    ),
    "max_batch": (int, 256, "queries searched for at once (default %(default)s)"),
    "max_wait_ms": (float, 5.0, "how long a query may wait for others to join it (default %(default)s)"),
    "searches": (
        int,
        None,
        "searches in parallel (default: one a core, at most 4, or 1 where there is a GPU)",
    ),
    "cache_mb": (float, 256.0, "memory for remembered searches; 0 for none (default %(default)s)"),
}
POSITIVE = (
    "max_queries",
    "max_topk",
    "max_passages",
    "max_body_mb",
    "max_connections",
    "request_s",
    "max_batch",
    "searches",
)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Serve a search index over HTTP, as Search-R1's retrieval server does."
    )
    parser.add_argument("--config", help="YAML whose retriever section gives what the options below do not")
    parser.add_argument("--index", help="folder made by `python -m lld.retrieval build`, or a FAISS file")
    parser.add_argument("--corpus", help='jsonl or jsonl.gz of {"id", "contents"}')
    parser.add_argument("--encoder", help=f"hub name or folder (default {config.Retriever.encoder})")
    for name, (kind, about) in RETRIEVER_OPTIONS.items():
        default = getattr(config.Retriever, name)
        parser.add_argument(flag(name), type=kind, help=f"{about} (default {default!r})")
    for name, (kind, default, about) in SERVER_OPTIONS.items():
        parser.add_argument(flag(name), type=kind, default=default, help=about)
    return parser.parse_args(arguments)


def check_server_options(args: argparse.Namespace) -> None:
    if not args.host.strip():
        raise ValueError(
            "--host is empty, which would serve every network (an unset variable?): "
            "give 127.0.0.1, or 0.0.0.0 if that is meant"
        )
    for name in POSITIVE:
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ValueError(f"{flag(name)} = {value}: must be greater than 0")
    if not 0 <= args.port < 1 << 16:
        raise ValueError(f"--port = {args.port}: must be from 0 (any free one) to 65535")
    for name in ("max_wait_ms", "cache_mb"):
        if not getattr(args, name) >= 0:
            raise ValueError(f"{flag(name)} = {getattr(args, name)}: must be 0 or more")


def parse_options(arguments: list[str] | None = None) -> tuple[config.Retriever, argparse.Namespace]:
    """The retriever's options and the server's own; the command line takes precedence over --config."""
    args = parse_arguments(arguments)
    check_server_options(args)
    tree = settings.to_dict(settings.load(args.config) if args.config else config.Config())
    for field in dataclasses.fields(config.Retriever):
        given = getattr(args, field.name, None)
        if given is not None:
            tree["retriever"][field.name] = given
    return settings.from_dict(tree).retriever, args


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet; ValueError if it cannot be bound."""
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
    """Answers requests until SIGTERM or Ctrl-C, then finishes those in progress."""
    server = uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", http=guarded_protocol(limits), timeout_graceful_shutdown=GRACE_S
        )
    )

    def stopped(*_) -> None:
        # After its shutdown uvicorn raises the signal again, which ends up here.
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stopped)
    server.run(sockets=[bound])


def start(arguments: list[str] | None = None) -> None:
    """Binds the port, opens the index, serves."""
    options, args = parse_options(arguments)
    limits = Limits(
        queries=args.max_queries,
        topk=args.max_topk,
        passages=args.max_passages,
        body_mb=args.max_body_mb,
        request_s=args.request_s,
        connections=args.max_connections,
    )
    # Bind first: opening an index may take minutes.
    bound = bind(args.host, args.port)
    if options.corpus is None:  # said before PyTorch is imported
        raise ValueError('retriever.corpus is null: give the passages, a jsonl of {"id", "contents"}')
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
    except OSError as error:  # another process listens there by now
        raise _cannot_bind(args.host, args.port, error) from None
    print(
        f"{len(retriever.corpus):,} passages, backend {retriever.backend}, listening on {url_of(bound)}",
        flush=True,
    )
    serve(app, bound, limits)


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def main() -> None:
    try:
        start()
    except ValueError as error:
        # Messages name options as in YAML (retriever.max_memory_gb); here they are flags (--max-memory-gb).
        text = re.sub(r"\bretriever\.([a-z_]+)", lambda match: flag(match[1]), str(error))
        print(f"error: {text}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # interrupted before serving


if __name__ == "__main__":
    main()
