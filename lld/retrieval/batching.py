"""Queries of many clients, batched for one index; with a cache and statistics.

A batch needs a few forward passes of the encoder and one scan of the vectors. The weights and the vectors are
read once for all its queries, and a GPU takes hardly longer for the batch than for one query.
"""

import asyncio
import collections
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from lld.protocol import Passage

LATENCIES = 10_000  # requests behind the percentiles
# Overhead of a cached search besides its texts: key, list, slot in the dict
ENTRY_BYTES = 500
PASSAGE_BYTES = 300  # of a passage besides its texts


class Busy(RuntimeError):
    """The server's limit on waiting queries or promised passages is reached."""


class Cache:
    """An LRU cache of searches within `max_bytes` of memory; with 0 it stays empty.

    The key is (index fingerprint, query, topk). Not thread-safe.
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
    """Memory of one cached search; a passage found by several searches counts in each."""
    texts = [query, *(passage.id for passage in passages), *(passage.contents for passage in passages)]
    return sum(map(sys.getsizeof, texts)) + ENTRY_BYTES + PASSAGE_BYTES * len(passages)


class Batcher:
    """Batches the queries of concurrent requests into few searches of the retriever.

    - A search starts when `max_batch` queries wait, or when none has arrived for `max_wait_s`. The wait lasts
      at most a quarter of the last search's time (or `max_wait_s`, if longer): clients that were just
      answered ask again, and half a batch costs more than half.
    - A single query that follows a batch of one starts at once.
    - `num_searches` run in parallel, one per thread. Use 1 on a GPU. On a CPU, two searches with one core
      each answer nearly twice as many queries as one search on two cores.
    - PyTorch's threads are divided among the searches; a search that runs alone gets all of them.
    - The last used thread is taken first, so a single client keeps one thread and its OpenMP team.
    - A query that already waits or runs is searched for once.
    - A search that fails is repeated query by query, so that a bad query fails only those who asked it.
    - At most `max_passages` (queries x topk, over all requests in progress) are promised at a time, and
      `max_waiting` queries wait. This bounds the memory; one request alone may exceed both.

    All methods run in the event loop, except the search itself.
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
        # A stack: the last used thread is at the end.
        self.idle_threads = [ThreadPoolExecutor(1, f"search-{number}") for number in range(num_searches)]
        self.num_threads, self.last_batch = torch.get_num_threads(), 0
        self.started, self.latencies_s = time.monotonic(), collections.deque(maxlen=LATENCIES)
        self.counts = collections.Counter(
            requests=0, queries=0, failed=0, batches=0, searched=0, largest_batch=0
        )

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """The passages of every query.

        Raises Busy if a limit is reached, and whatever the retriever raises.
        """
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
        if self.waiting and len(self.waiting) + len(new) > self.max_waiting:
            self.counts["failed"] += 1
            raise Busy(f"{len(self.waiting)} queries are waiting already")
        for query in new:
            pending[query] = self.waiting[topk, query] = asyncio.get_running_loop().create_future()
        if new:
            self.arrived.set()
            self._start()
        if pending:
            # Not asyncio.gather: a client that disconnects must not cancel searches that others wait for.
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
        finally:
            # Not in a done callback: that runs one iteration of the event loop later, and a query that
            # arrives in between would start no task and wait forever.
            self.tasks.discard(asyncio.current_task())

    async def _work(self) -> None:
        # A single client does not wait for others.
        last_s, lone = 0.0, self.last_batch == 1 and len(self.waiting) == 1
        while self.waiting:
            if not lone:
                await self._gather(max(self.max_wait_s, last_s / 4))
            lone = False
            if not self.waiting:  # taken by another search
                return
            # One topk per search: on an approximate index the best 3 of 10 may differ from a search for 3.
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
            except Exception as error:  # no thread could be started
                results = [error] * len(keys)
            finally:
                self.idle_threads.append(thread)
            self._answer(futures, results)
            for key in keys:
                del self.running[key]
            self.num_busy -= 1
            self.counts.update(batches=1, searched=len(keys))
            self.counts["largest_batch"] = max(self.counts["largest_batch"], len(keys))
            last_s = time.monotonic() - began
            await asyncio.sleep(0)  # lets answered clients ask again

    def _search(self, queries: list[str], topk: int, num_threads: int) -> list[list[Passage] | Exception]:
        """The passages of each query, or what the retriever raised for it alone."""
        torch.set_num_threads(num_threads)  # of the calling thread
        try:
            results = self.retriever.search(queries, topk)
            assert len(results) == len(queries)
            return results
        except Exception as error:
            if len(queries) == 1:
                return [error]
        return [self._search([query], topk, num_threads)[0] for query in queries]

    def _answer(self, futures: dict[tuple[int, str], asyncio.Future], results: list) -> None:
        for ((topk, query), future), found in zip(futures.items(), results, strict=True):
            if isinstance(found, Exception):
                # Raised by the retriever: pass it on to the clients and keep the server running.
                future.set_exception(found)
                # Marks it as retrieved, so asyncio logs nothing if every client has disconnected.
                future.exception()
            else:
                self.cache.put(query, topk, found)
                future.set_result(found)

    async def _gather(self, longest_s: float) -> None:
        end = time.monotonic() + longest_s
        while len(self.waiting) < self.max_batch and (left_s := end - time.monotonic()) > 0:
            self.arrived.clear()
            try:
                await asyncio.wait_for(self.arrived.wait(), min(left_s, self.max_wait_s))
            except TimeoutError:
                return

    def stats(self) -> dict:
        """Counts since the start, the queue now, batch sizes, and latency percentiles in ms.

        Percentiles are over the last LATENCIES requests.
        """
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
        """Waits for the searches in progress, then stops the threads."""
        if self.tasks:
            await asyncio.wait(self.tasks)
        for thread in self.idle_threads:
            thread.shutdown()
