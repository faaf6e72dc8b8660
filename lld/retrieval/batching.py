"""What stands between many clients and one index: requests gathered into batches, a cache, and statistics.

A batch is searched for in few passes of the encoder and one over the vectors: the weights and the vectors are
read once for all its queries, and a GPU takes hardly longer than for one.
"""

import asyncio
import collections
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from lld.protocol import Passage

LATENCIES = 10_000  # requests that the percentiles look back on
ENTRY_BYTES = 500  # of a remembered search beside its texts: key, list, place in the dict
PASSAGE_BYTES = 300  # of a passage beside its texts


class Busy(RuntimeError):
    """More queries are waiting than the server takes on."""


class Cache:
    """The last searches, by (query, topk) and the index's fingerprint, in `max_bytes` of memory; 0 keeps
    none.

    Used by one thread.
    """

    def __init__(self, max_bytes: float, fingerprint: str):
        self.max_bytes, self.fingerprint, self.found = max_bytes, fingerprint, collections.OrderedDict()
        self.num_hits = self.num_misses = self.num_bytes = 0

    def get(self, query: str, topk: int) -> list[Passage] | None:
        key = (self.fingerprint, query, topk)
        if key not in self.found:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self.found.move_to_end(key)
        return self.found[key]

    def put(self, query: str, topk: int, passages: list[Passage]) -> None:
        key = (self.fingerprint, query, topk)
        if key in self.found:
            self.num_bytes -= _entry_bytes(query, self.found.pop(key))
        self.found[key] = passages
        self.num_bytes += _entry_bytes(query, passages)
        while self.found and self.num_bytes > self.max_bytes:
            (_, oldest, _), forgotten = self.found.popitem(last=False)
            self.num_bytes -= _entry_bytes(oldest, forgotten)


def _entry_bytes(query: str, passages: list[Passage]) -> int:
    """What a search takes in the cache; a passage that several searches found counts in each."""
    texts = [query, *(passage.id for passage in passages), *(passage.contents for passage in passages)]
    return sum(map(sys.getsizeof, texts)) + ENTRY_BYTES + PASSAGE_BYTES * len(passages)


class Batcher:
    """Answers queries of many requests with few searches of the retriever.

    A search begins when `max_batch` queries wait, or none has come for `max_wait_s`, at the latest a quarter
    of the last search's time after the first: those who were just answered ask again, and half a batch costs
    more than half. A query that comes alone after one that was alone is not kept waiting. `num_searches` run
    side by side, each on one of the threads that share what waits: 1 suits a GPU; on a CPU, searches with a
    core each answer nearly twice as many as one search on two cores. PyTorch's threads are shared out among
    them, and a search that is alone gets all. The thread that was used last is taken first, so that a lone
    client keeps one thread and its OpenMP team. A query that waits or runs already is not searched for twice.
    At most `max_passages` (queries x topk, over all requests under way) are promised at a time, which bounds
    what replies take. All methods but the search itself run in the event loop.
    """

    def __init__(
        self,
        retriever,
        *,
        max_batch: int = 256,
        max_wait_s: float = 0.005,
        max_waiting: int = 16384,
        max_passages: float = float("inf"),
        cache_bytes: float = 256e6,
        num_searches: int = 1,
    ):
        self.retriever, self.max_batch, self.max_wait_s, self.max_waiting = (
            retriever,
            max_batch,
            max_wait_s,
            max_waiting,
        )
        self.max_passages, self.num_passages = max_passages, 0
        self.cache = Cache(cache_bytes, retriever.fingerprint)
        self.waiting: collections.OrderedDict[tuple[int, str], asyncio.Future] = collections.OrderedDict()
        self.running: dict[tuple[int, str], asyncio.Future] = {}
        self.arrived, self.tasks, self.num_searches, self.num_busy = asyncio.Event(), set(), num_searches, 0
        # The one used last is the last.
        self.idle_threads = [ThreadPoolExecutor(1, f"search-{number}") for number in range(num_searches)]
        self.num_threads, self.last_batch = torch.get_num_threads(), 0
        self.started, self.latencies_s = time.monotonic(), collections.deque(maxlen=LATENCIES)
        self.counts = collections.Counter(
            requests=0, queries=0, failed=0, batches=0, searched=0, largest_batch=0
        )

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """The passages of every query; Busy where too many wait, and whatever the retriever raises."""
        promised = len(queries) * topk
        self.counts["requests"] += 1
        self.counts["queries"] += len(queries)
        if self.num_passages and self.num_passages + promised > self.max_passages:
            self.counts["failed"] += 1
            raise Busy(
                f"{self.num_passages} passages are being looked up for others, with {promised} more than "
                f"{self.max_passages}"
            )
        self.num_passages += promised
        try:
            return await self._find(queries, topk)
        finally:
            self.num_passages -= promised

    async def _find(self, queries: list[str], topk: int) -> list[list[Passage]]:
        began, found, pending = time.monotonic(), {}, {}
        for query in dict.fromkeys(queries):
            passages = self.cache.get(query, topk)
            if passages is not None:
                found[query] = passages
            else:
                pending[query] = self.running.get((topk, query)) or self.waiting.get((topk, query))
        new = [query for query, future in pending.items() if future is None]
        if len(self.waiting) + len(new) > self.max_waiting:
            self.counts["failed"] += 1
            raise Busy(f"{len(self.waiting)} queries are waiting already")
        for query in new:
            pending[query] = self.waiting[topk, query] = asyncio.get_running_loop().create_future()
        if new:
            self.arrived.set()
            self._start()
        if pending:
            # Not gather: a client that leaves must not cancel what others wait for
            await asyncio.wait(pending.values())
            failures = [future.exception() for future in pending.values() if future.exception() is not None]
            if failures:
                self.counts["failed"] += 1
                raise failures[0]
        found |= {query: future.result() for query, future in pending.items()}
        self.latencies_s.append(time.monotonic() - began)
        return [found[query] for query in queries]

    def _start(self) -> None:
        if self.waiting and len(self.tasks) < self.num_searches:
            self.tasks.add(asyncio.create_task(self._run()))

    async def _run(self) -> None:
        try:
            await self._work()
        # At once: a callback of the task comes a turn of the loop later, and a query of that turn would wait
        # for ever
        finally:
            self.tasks.discard(asyncio.current_task())

    async def _work(self) -> None:
        # A client that is alone need not wait for company
        last_s, lone = 0.0, self.last_batch == 1 and len(self.waiting) == 1
        while self.waiting:
            if not lone:
                await self._gather(max(self.max_wait_s, last_s / 4))
            lone = False
            if not self.waiting:  # another search took them
                return
            # One topk a search: an approximate index answers 3 of 10 other than 3 of 3
            topk = next(iter(self.waiting))[0]
            share = -(-len(self.waiting) // (self.num_searches - self.num_busy))
            keys = [key for key in self.waiting if key[0] == topk][: min(share, self.max_batch)]
            futures = {key: self.waiting.pop(key) for key in keys}
            num_threads = (
                max(1, self.num_threads // self.num_searches)
                if self.running or self.waiting
                else self.num_threads
            )
            self.running |= futures
            self.num_busy, self.last_batch = self.num_busy + 1, len(keys)
            self._start()
            began, thread = time.monotonic(), self.idle_threads.pop()
            try:
                results = await asyncio.get_running_loop().run_in_executor(
                    thread, self._search, [query for _, query in keys], topk, num_threads
                )
                assert len(results) == len(keys)
            except Exception as error:  # the retriever's; those who asked are told, and the server lives on
                for future in futures.values():
                    future.set_exception(error)
                    future.exception()  # heard, even where every client has left
            else:
                for (_, query), future, passages in zip(keys, futures.values(), results, strict=True):
                    self.cache.put(query, topk, passages)
                    future.set_result(passages)
            finally:
                self.idle_threads.append(thread)
            for key in keys:
                del self.running[key]
            self.num_busy -= 1
            self.counts.update(batches=1, searched=len(keys))
            self.counts["largest_batch"] = max(self.counts["largest_batch"], len(keys))
            last_s = time.monotonic() - began
            await asyncio.sleep(0)  # those who were just answered may ask again at once

    def _search(self, queries: list[str], topk: int, num_threads: int) -> list[list[Passage]]:
        torch.set_num_threads(num_threads)  # of the calling thread
        return self.retriever.search(queries, topk)

    async def _gather(self, longest_s: float) -> None:
        end = time.monotonic() + longest_s
        while len(self.waiting) < self.max_batch and (left_s := end - time.monotonic()) > 0:
            self.arrived.clear()
            try:
                await asyncio.wait_for(self.arrived.wait(), min(left_s, self.max_wait_s))
            except asyncio.TimeoutError:
                return

    def stats(self) -> dict:
        """Counts since the start, the queue now, the size of batches, and latency percentiles of the last
        requests, in ms."""
        ordered, counts = sorted(self.latencies_s), self.counts

        def percentile(share):
            return (
                round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)
                if ordered
                else None
            )

        looked_up = self.cache.num_hits + self.cache.num_misses
        return {
            "uptime_s": round(time.monotonic() - self.started, 1),
            "requests": counts["requests"],
            "queries": counts["queries"],
            "failed_requests": counts["failed"],
            "queue": {"waiting": len(self.waiting), "running": len(self.running)},
            "batches": {
                "count": counts["batches"],
                "mean": round(counts["searched"] / max(1, counts["batches"]), 2),
                "largest": counts["largest_batch"],
            },
            "latency_ms": {"p50": percentile(0.5), "p90": percentile(0.9), "p99": percentile(0.99)},
            "cache": {
                "entries": len(self.cache.found),
                "bytes": self.cache.num_bytes,
                "hits": self.cache.num_hits,
                "hit_rate": round(self.cache.num_hits / max(1, looked_up), 4),
            },
        }

    async def close(self) -> None:
        """Lets what is under way end."""
        if self.tasks:
            await asyncio.wait(self.tasks)
        for thread in self.idle_threads:
            thread.shutdown()
