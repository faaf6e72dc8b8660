"""Throughput and latency of retriever_server.py under concurrent clients, beside a plain
one-request-one-search server.

    python tests/bench/retriever_load.py --index FOLDER --corpus ../shared/data/corpus.jsonl.gz --encoder
    FOLDER

The plain server is what Search-R1's is: FastAPI, a synchronous handler (so a thread a request), one encoding
and one FAISS search a request; same encoder, same flat index, same web server (uvicorn with httptools and
uvloop, where installed), same environment: with OMP_NUM_THREADS unset, as users start both, PyTorch takes all
cores for each search of either. Each of the N clients asks one query after another: the real questions of
../shared in a random order, all different (when all were asked, again with a word added), so that the cache
never helps; "again" asks ours the same a second time, so that it always does. The servers take turns,
`--rounds` of them a row, so that other work on the machine falls on both. `--group G` lets G clients at a
time ask the same. The clients are one process of their own (asyncio, raw HTTP/1.1 over kept connections), the
server another. "CPU ms" is what a server burns a query, which other work on the machine distorts least.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

PLAIN = """
import sys
sys.path.insert(0, sys.argv[1])
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from lld.config import Retriever
from lld.retrieval.backends import open_retriever

index, corpus, encoder = sys.argv[2:5]
retriever = open_retriever(Retriever(url=None, index=index, corpus=corpus, encoder=encoder, device="cpu"))
app = FastAPI()

class Query(BaseModel):
    queries: list[str]
    topk: int | None = None
    return_scores: bool = False

@app.post("/retrieve")
def retrieve(query: Query):
    hits = retriever.search(query.queries, query.topk or 3)
    return {
        "result": [
            [{"document": {"id": p.id, "contents": p.contents}, "score": p.score} for p in passages]
            for passages in hits
        ]
    }

@app.get("/health")
def health():
    return {}

uvicorn.run(app, port=int(sys.argv[5]), log_level="warning")
"""


async def ask(reader, writer, query: str) -> None:
    body = json.dumps({"queries": [query], "topk": 3, "return_scores": True}).encode()
    writer.write(
        b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(body)
        + body
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    assert len(json.loads(await reader.readexactly(length))["result"][0]) == 3


async def load(
    port: int, num_clients: int, queries: list[str], seconds: float
) -> tuple[float, list[float], int]:
    """Queries a second, sorted latencies in s, and how many queries were asked; until `seconds` are over or
    none is left."""
    latencies, waiting, end = [], iter(queries), time.perf_counter() + seconds

    async def client():
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        for query in waiting:
            began = time.perf_counter()
            await ask(reader, writer, query)
            latencies.append(time.perf_counter() - began)
            if time.perf_counter() > end:
                break
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(num_clients)))
    return len(latencies) / (time.perf_counter() - began), sorted(latencies), len(latencies)


def start(command: list[str]) -> tuple[subprocess.Popen, int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    process = subprocess.Popen(
        [*command, str(port)], cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=os.environ
    )
    while True:
        assert process.poll() is None, "the server did not start"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process, port
        except OSError:
            time.sleep(0.2)


def measure(
    process: subprocess.Popen, port: int, num_clients: int, queries: list[str], seconds: float
) -> tuple[float, list[float], float, int]:
    """Wall seconds, latencies in s, CPU seconds of the server, and how many queries were asked."""

    def cpu_s():
        return sum(psutil.Process(process.pid).cpu_times()[:2])

    before, began = cpu_s(), time.perf_counter()
    _, latencies, asked = asyncio.run(load(port, num_clients, queries, seconds))
    return time.perf_counter() - began, latencies, cpu_s() - before, asked


def summarize(turns: list[tuple[float, list[float], float, int]]) -> tuple[float, float, float, float]:
    """Queries a second, p50 and p99 in ms, CPU ms a query, of all turns of a server."""
    asked, latencies = (
        sum(turn[3] for turn in turns),
        sorted(latency for turn in turns for latency in turn[1]),
    )

    def percentile(share):
        return 1000 * latencies[min(len(latencies) - 1, int(share * len(latencies)))]

    return (
        asked / sum(turn[0] for turn in turns),
        percentile(0.5),
        percentile(0.99),
        1000 * sum(turn[2] for turn in turns) / asked,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--index", "--corpus", "--encoder"):
        parser.add_argument(name, required=True)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument(
        "--group",
        type=int,
        default=1,
        help="clients that ask the same question at the same time, as the episodes of a GRPO group do",
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement, all rounds together")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each server in a measurement")
    args = parser.parse_args()
    questions = [
        json.loads(line)["question"]
        for path in sorted((ROOT.parent / "shared" / "data" / "qa").glob("*.jsonl"))
        for line in path.open()
    ]
    random.Random(0).shuffle(questions)  # those of one benchmark are alike in length
    fresh = [
        f"{question} {tail}".strip()
        for tail in ("", "please", "now", "exactly", "today", "really")
        for question in questions
    ]
    fresh = [query for query in fresh for _ in range(args.group)]
    ours = [
        sys.executable,
        "retriever_server.py",
        "--index",
        args.index,
        "--corpus",
        args.corpus,
        "--encoder",
        args.encoder,
        "--device",
        "cpu",
        "--port",
    ]
    plain = [sys.executable, "-c", PLAIN, str(ROOT), args.index, args.corpus, args.encoder]
    servers = {"plain": start(plain), "ours": start(ours)}
    print(
        "| clients | plain q/s | p50 ms | p99 ms | CPU ms | ours q/s | p50 ms | p99 ms | CPU ms | ratio "
        "q/s | ratio CPU | again (cache) q/s | p99 ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    try:
        for _, port in servers.values():
            asyncio.run(load(port, 2, ["warm up"] * 20, 5))
        at = 0
        for num in args.clients:
            row, known = {name: [] for name in servers}, []
            for _ in range(args.rounds):
                for name, (process, port) in servers.items():
                    row[name].append(measure(process, port, num, fresh[at:], args.seconds / args.rounds))
                known += fresh[at : at + row["ours"][-1][3]]  # in its cache now
                at += max(turns[-1][3] for turns in row.values())
            row = {name: summarize(turns) for name, turns in row.items()}
            rate, latencies, _ = asyncio.run(load(servers["ours"][1], num, known, args.seconds))
            cells = [f"{value:.1f}" for name in ("plain", "ours") for value in row[name]]
            print(
                f"| {num} | {' | '.join(cells)} | {row['ours'][0] / row['plain'][0]:.1f} | "
                f"{row['plain'][3] / row['ours'][3]:.1f} | {rate:.0f} | "
                f"{1000 * latencies[int(0.99 * len(latencies))]:.0f} |",
                flush=True,
            )
    finally:
        for process, _ in servers.values():
            process.terminate()
            process.wait(10)


if __name__ == "__main__":
    main()
