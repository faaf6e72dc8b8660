"""The client of a retrieval server, and the search tool of a run.

A search goes over HTTP, to an index in this process, or to a recording. After bounded retries within a
deadline, a failed HTTP search raises a typed `RetrieverError` of `lld.tools`.
"""

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import httpx

from lld.config import Retriever
from lld.protocol import Passage, is_blank
from lld.retrieval.luck import Luck
from lld.retrieval.recording import Recording
from lld.tools import Malformed, Refused, RetrieverError, ServerFault, TimedOut, Unreachable

BACKOFF_S = 0.5  # before the first retry, then doubled
MAX_BACKOFF_S = 8.0
MAX_REPLY_BYTES = 1 << 30
REMEDY = "start one with `python retriever_server.py --index INDEX --corpus CORPUS`, or mend retriever.url"


def endpoint(url: str) -> str:
    """`url` with the path /retrieve appended unless it is there; ValueError if it is no http(s) address."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(
            f"retriever.url = {url!r}: must begin with http:// or https://, such as http://127.0.0.1:8000"
        )
    try:
        httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"retriever.url = {url!r} is no address: {error}") from None
    return url.rstrip("/").removesuffix("/retrieve") + "/retrieve"


def read_result(body: object, num_queries: int, topk: int) -> list[list[Passage]]:
    """The passages in a reply of Search-R1's shape, at most `topk` a query.

    That is {"result": [[{"document": {"id", "contents"}, "score"}, …], …]}. Bare documents and a missing id
    or score are accepted. Blank documents are left out, so a query may have no passage. Anything else raises
    ValueError.
    """
    result = body.get("result") if isinstance(body, dict) else None
    if not isinstance(result, list):
        raise ValueError('the reply holds no list "result"')
    if len(result) != num_queries:
        raise ValueError(f"{len(result)} results for {num_queries} queries")
    hits = []
    for number, items in enumerate(result, start=1):
        if not isinstance(items, list):
            raise ValueError(f"no list of passages for query {number} of {num_queries}")
        passages = [_read_passage(item, f"query {number} of {num_queries}") for item in items[:topk]]
        hits.append([passage for passage in passages if not is_blank(passage.contents)])
    return hits


def _read_passage(item: object, where: str) -> Passage:
    document = item.get("document", item) if isinstance(item, dict) else None
    contents = document.get("contents") if isinstance(document, dict) else None
    if not isinstance(contents, str):
        raise ValueError(f'a passage without "contents" for {where}')

    # Lone surrogates, which JSON can encode, become U+FFFD: tokenizers and UTF-8 files reject them.
    def whole(text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    name, score = document.get("id"), item.get("score")

    def is_number(value):
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    try:
        score = float(score) if is_number(score) else 0.0
    except OverflowError:
        score = math.inf
    return Passage(
        whole(str(name)) if isinstance(name, str) or is_number(name) else "",
        whole(contents),
        score if math.isfinite(score) else 0.0,
    )


def _read_body(reply: httpx.Response, end: float, late: str) -> bytes:
    """The whole body; raises TimedOut(late) once the clock passes `end`.

    httpx's own timeout is per read, so it does not bound the whole reply.
    """
    body = bytearray()
    for piece in reply.iter_bytes():
        body += piece
        if time.monotonic() > end:
            raise TimedOut(late)
        if len(body) > MAX_REPLY_BYTES:
            raise Malformed(f"a reply of more than {MAX_REPLY_BYTES} bytes")
    return bytes(body)


class Client:
    """Searches over HTTP on one or several servers of the same index; thread-safe.

    Requests go to the servers in turn, over persistent connections. A failed attempt is retried on the next
    server; once all have been tried, after a pause that doubles each round. One attempt may take `timeout_s`,
    all attempts and pauses together `deadline_s`. The typed RetrieverError is raised after `retries` retries,
    and at once if the server refuses the request.
    """

    def __init__(
        self, urls: list[str], *, timeout_s: float, retries: int = 0, deadline_s: float = float("inf")
    ):
        self.addresses = [endpoint(url) for url in urls]
        self.timeout_s, self.retries, self.deadline_s = timeout_s, retries, deadline_s
        # The environment's proxies are for the internet, not for a retriever.
        self.http = httpx.Client(trust_env=False)
        self.lock, self.num_requests = threading.Lock(), 0

    def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """The `topk` best passages of every query, from servers with Search-R1's /retrieve.

        Without queries no request is sent.
        """
        if not queries:
            return []
        with self.lock:
            turn, self.num_requests = self.num_requests, self.num_requests + 1
        end = time.monotonic() + self.deadline_s
        for attempt in range(self.retries + 1):
            address = self.addresses[(turn + attempt) % len(self.addresses)]
            try:
                return self._ask(address, queries, topk, min(self.timeout_s, end - time.monotonic()))
            except Refused:
                raise
            except RetrieverError as error:
                kind, reason = type(error), str(error)  # not the error: its traceback holds this frame
            # No pause before a server that has not been tried yet.
            rounds, waiting = divmod(attempt + 1, len(self.addresses))
            pause_s = 0.0 if waiting else min(BACKOFF_S * 2 ** min(rounds - 1, 32), MAX_BACKOFF_S)
            if attempt == self.retries or time.monotonic() + pause_s >= end:
                break
            if pause_s:
                time.sleep(pause_s)
        attempts = f"{attempt + 1} attempt{'s' if attempt else ''}"
        raise kind(
            f"retriever {address} failed {attempts} with {len(queries)} queries; last reason: {reason}; "
            f"{REMEDY}"
        )

    def _ask(self, address: str, queries: list[str], topk: int, timeout_s: float) -> list[list[Passage]]:
        end = time.monotonic() + timeout_s
        late = f"no reply within {timeout_s:.3g} s (retriever.timeout_s, retriever.deadline_s)"
        try:
            with self.http.stream(
                "POST",
                address,
                json={"queries": queries, "topk": topk, "return_scores": True},
                timeout=max(timeout_s, 1e-3),
            ) as reply:
                body = _read_body(reply, end, late)
            if reply.status_code == 200:
                return read_result(json.loads(body), len(queries), topk)
        except httpx.TimeoutException:
            raise TimedOut(late) from None
        except httpx.HTTPError as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from None
        except (ValueError, RecursionError) as error:  # not JSON, or of another shape
            raise Malformed(f"{type(error).__name__}: {error}") from None
        reason = f"status {reply.status_code}: {body[:200].decode('utf-8', 'replace')!r}"
        if reply.status_code >= 500 or reply.status_code == 429:
            raise ServerFault(reason)
        raise Refused(
            f"retriever {address} refused the request with {reason}; check that it is a /retrieve server "
            f"of Search-R1's shape ({REMEDY})"
        )

    def fingerprints(self) -> list[str | None]:
        """The index fingerprint in each server's /health; None without one, as with Search-R1's server."""
        found = []
        for address in self.addresses:
            try:
                with self.http.stream(
                    "GET", address.removesuffix("/retrieve") + "/health", timeout=self.timeout_s
                ) as reply:
                    fingerprint = json.loads(_read_body(reply, time.monotonic() + self.timeout_s, "/health"))[
                        "fingerprint"
                    ]
            except (RetrieverError, httpx.HTTPError, ValueError, KeyError, TypeError, RecursionError):
                fingerprint = None
            found.append(fingerprint if isinstance(fingerprint, str) else None)
        return found


def urls_of(options: Retriever) -> list[str]:
    return [options.url, *options.replicas]


def check_health(options: Retriever) -> None:
    """Sends a test query to every server before a run starts; RetrieverError if one fails.

    It is a real search, because Search-R1's server has no /health. ValueError if two servers report different
    indexes: a query's passages would depend on which server answers.
    """
    if options.url is None or options.replay is not None:
        return
    for url in urls_of(options):
        Client([url], timeout_s=options.timeout_s).search(["Who wrote Hamlet?"], 1)
    known = {
        fingerprint
        for fingerprint in Client(urls_of(options), timeout_s=options.timeout_s).fingerprints()
        if fingerprint is not None
    }
    if len(known) > 1:
        raise ValueError(
            "the servers of retriever.url and retriever.replicas hold different indexes "
            f"({', '.join(sorted(known))}): start them with the same --index, --corpus and options"
        )


@dataclass(frozen=True)
class Search:
    """A search tool.

    fingerprint: of its index; changes whenever the results may (None: unknown). luck: which episodes it fails
    (None: none of them).
    """

    find: Callable[[list[str]], list[list[Passage]]]
    fingerprint: str | None
    luck: Luck | None = None

    def __call__(self, queries: list[str]) -> list[list[Passage]]:
        return self.find(queries)


def make_search(options: Retriever) -> Search:
    """The search tool of a run: a replay, HTTP if `options.url` is set, else an index in this process.

    With `options.record`, the searches of the last two are recorded. With `options.fail_share`, it fails that
    share of the episodes.
    """
    search = _make_search(options)
    if not options.fail_share:
        return search
    # Imported here: only this control needs numpy and the corpus beside a server.
    from lld.retrieval.controls import RandomSearch
    from lld.retrieval.corpus import Corpus

    luck = Luck(options.fail_share, RandomSearch(Corpus(options.corpus)).search, options.topk)
    return replace(search, luck=luck)


def _make_search(options: Retriever) -> Search:
    if options.replay is not None:
        return Search(Recording(options.replay, options.topk).replay, None)
    if options.url is not None:
        client = Client(
            urls_of(options),
            timeout_s=options.timeout_s,
            retries=options.retries,
            deadline_s=options.deadline_s,
        )
        search = Search(
            lambda queries: client.search(queries, options.topk),
            next(filter(None, client.fingerprints()), None),
        )
    else:
        # Imported here: a run that searches over HTTP needs neither FAISS nor bm25s.
        from lld.retrieval.backends import open_retriever

        retriever = open_retriever(options)
        search = Search(lambda queries: retriever.search(queries, options.topk), retriever.fingerprint)
    if options.record is None:
        return search
    return Search(
        Recording(options.record, options.topk, search, search.fingerprint).record, search.fingerprint
    )
