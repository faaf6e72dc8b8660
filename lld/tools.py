"""Tools as functions: a list of queries in, a list of passages for each out. Search over HTTP, or in this process.

A search that fails stops the step with `RetrieverError` after bounded retries. It never becomes an empty passage, which the
policy would learn from.
"""

import functools
import time
from collections.abc import Callable

import httpx

from lld.config import Retriever
from lld.protocol import Passage

BACKOFF_S = 0.5  # before the first retry; doubled before each later one
MAX_BACKOFF_S = 8.0
REMEDY = "start one with `python retriever_server.py --index INDEX --corpus CORPUS`, or mend retriever.url"


class RetrieverError(RuntimeError):
    """The retriever did not answer as it must; the message names its url, the attempts, the last reason and the remedy."""


@functools.cache
def _client() -> httpx.Client:
    """One keep-alive client for all threads; proxies of the environment are for the internet, not for a retriever."""
    return httpx.Client(trust_env=False)


def endpoint(url: str) -> str:
    """`url` with the path /retrieve, which it may have already; ValueError unless it is an http address."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"retriever.url = {url!r}: must begin with http:// or https://, such as http://127.0.0.1:8000")
    try:
        httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"retriever.url = {url!r} is no address: {error}") from None
    return url.rstrip("/").removesuffix("/retrieve") + "/retrieve"


def read_result(body: object, num_queries: int, topk: int) -> list[list[Passage]]:
    """The passages in Search-R1's reply {"result": [[{"document": {"id", "contents"}, "score"}, …], …]}, at most `topk` each.

    Bare documents and a missing id or score are taken too. ValueError says what is wrong with anything else, an empty list included.
    """
    result = body.get("result") if isinstance(body, dict) else None
    if not isinstance(result, list):
        raise ValueError('the reply holds no list "result"')
    if len(result) != num_queries:
        raise ValueError(f"{len(result)} results for {num_queries} queries")
    hits = []
    for number, items in enumerate(result, start=1):
        if not isinstance(items, list) or not items:
            raise ValueError(f"no passage for query {number} of {num_queries}")
        passages = []
        for item in items[:topk]:
            document = item.get("document", item) if isinstance(item, dict) else None
            contents = document.get("contents") if isinstance(document, dict) else None
            if not isinstance(contents, str) or not contents.strip():
                raise ValueError(f'a passage without "contents" for query {number} of {num_queries}')
            score = item.get("score")
            passages.append(Passage(str(document.get("id", "")), contents, float(score) if isinstance(score, (int, float)) else 0.0))
        hits.append(passages)
    return hits


def search_over_http(queries: list[str], *, url: str, topk: int, timeout_s: float, retries: int) -> list[list[Passage]]:
    """The `topk` best passages of every query, from a server that speaks Search-R1's /retrieve (ours or theirs).

    Connection errors, timeouts, 5xx and malformed replies are tried again `retries` times, with growing pauses;
    then, and at once for any other status, RetrieverError. No queries, no request.
    """
    if not queries:
        return []
    address, reason = endpoint(url), ""
    for attempt in range(retries + 1):
        if attempt:
            time.sleep(min(BACKOFF_S * 2 ** (attempt - 1), MAX_BACKOFF_S))
        try:
            reply = _client().post(address, json={"queries": queries, "topk": topk, "return_scores": True}, timeout=timeout_s)
            if reply.status_code == 200:
                return read_result(reply.json(), len(queries), topk)
            reason = f"status {reply.status_code}: {reply.text[:200]!r}"
            if reply.status_code < 500:
                raise RetrieverError(f"retriever {address} refused the request with {reason}; check that it is a /retrieve server of Search-R1's shape ({REMEDY})")
        except httpx.TimeoutException:
            reason = f"no reply within {timeout_s:g} s (retriever.timeout_s)"
        except (httpx.HTTPError, ValueError) as error:  # ValueError: not JSON, or not the reply's shape
            reason = f"{type(error).__name__}: {error}"
    attempts = f"{retries + 1} attempt{'s' if retries else ''}"
    raise RetrieverError(f"retriever {address} failed {attempts} with {len(queries)} queries; last reason: {reason}; {REMEDY}")


def check_health(url: str, timeout_s: float) -> None:
    """Asks the retriever one real question before a run starts (Search-R1's server has no /health); RetrieverError if it fails."""
    search_over_http(["Who wrote Hamlet?"], url=url, topk=1, timeout_s=timeout_s, retries=0)


def make_search(options: Retriever) -> Callable[[list[str]], list[list[Passage]]]:
    """The search tool: over HTTP if `options.url` is set, else with an index opened in this process."""
    if options.url is not None:
        return functools.partial(search_over_http, url=endpoint(options.url).removesuffix("/retrieve"), topk=options.topk, timeout_s=options.timeout_s, retries=options.retries)
    from lld.retrieval import open_retriever  # here, because a run that searches over HTTP needs neither FAISS nor bm25s

    retriever = open_retriever(options)
    return lambda queries: retriever.search(queries, options.topk)
