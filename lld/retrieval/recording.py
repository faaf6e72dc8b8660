"""Record and replay of searches, so that a run can be repeated without its index.

A recording is one SQLite file that maps (query, topk) to passages.
"""

import json
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

from lld.protocol import Passage

TABLES = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS searches (query TEXT, topk INTEGER, passages TEXT, PRIMARY KEY (query, topk))
    WITHOUT ROWID;
"""


class Recording:
    """A file of searches, shared by all threads and processes of a run.

    A search is committed before it is answered, so a killed run loses none. The first answer to a query is
    kept, and every process gets it from then on. A replay therefore sees what the recorded run saw, even if
    the index breaks ties differently each time. Failed searches are not recorded; empty results are.
    """

    def __init__(
        self,
        path: str,
        topk: int,
        search: Callable[[list[str]], list[list[Passage]]] | None = None,
        fingerprint: str | None = None,
    ):
        """Records into `path` if `search` is given, else replays it.

        ValueError if `path` is not a recording, or was made with another index or another topk.
        """
        if search is None and not Path(path).is_file():
            raise ValueError(f"retriever.replay = {path}: no such recording; make one with retriever.record")
        self.path, self.topk, self.search, self.lock = path, topk, search, threading.Lock()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            self.file = sqlite3.connect(path, timeout=60, check_same_thread=False, isolation_level=None)
            self.file.executescript(TABLES) if search else self.file.execute("SELECT count(*) FROM about")
        except sqlite3.DatabaseError as error:
            raise ValueError(
                f"{path} is no recording of searches ({error}): give another file, or delete it"
            ) from None
        if search is None:
            recorded = self._topks()
            if recorded and topk not in recorded:
                raise ValueError(
                    f"retriever.replay = {path} was recorded with topk {', '.join(map(str, recorded))}, "
                    f"not {topk}: set retriever.topk to that"
                )
            return
        self.file.execute("INSERT OR IGNORE INTO about VALUES ('fingerprint', ?)", (fingerprint,))
        [(before,)] = self.file.execute("SELECT value FROM about WHERE name = 'fingerprint'")
        if before != fingerprint:
            raise ValueError(
                f"retriever.record = {path} was recorded from index {before}, not {fingerprint}: choose "
                "another file, or delete it"
            )

    def _topks(self) -> list[int]:
        return [topk for (topk,) in self.file.execute("SELECT DISTINCT topk FROM searches ORDER BY topk")]

    def _look_up(self, queries: list[str]) -> dict[str, list[Passage]]:
        found = {}
        with self.lock:
            for query in dict.fromkeys(queries):
                for (passages,) in self.file.execute(
                    "SELECT passages FROM searches WHERE query = ? AND topk = ?", (query, self.topk)
                ):
                    found[query] = [Passage(*passage) for passage in json.loads(passages)]
        return found

    def record(self, queries: list[str]) -> list[list[Passage]]:
        """The passages of every query: from the recording, or searched for and recorded now."""
        found = self._look_up(queries)
        new = [query for query in dict.fromkeys(queries) if query not in found]
        if new:
            rows = [
                (query, self.topk, json.dumps([[p.id, p.contents, p.score] for p in passages]))
                for query, passages in zip(new, self.search(new), strict=True)
            ]
            with self.lock:
                self.file.execute("BEGIN IMMEDIATE")
                self.file.executemany("INSERT OR IGNORE INTO searches VALUES (?, ?, ?)", rows)
                self.file.execute("COMMIT")
            found |= self._look_up(new)
        return [found[query] for query in queries]

    def replay(self, queries: list[str]) -> list[list[Passage]]:
        """The recorded passages; ValueError for a query that was not recorded."""
        found = self._look_up(queries)
        for query in queries:
            if query not in found:
                raise ValueError(
                    f"retriever.replay = {self.path} has no search {query[:200]!r} with topk {self.topk}: "
                    "the run is not the recorded one (seed, options, weights or number of processes "
                    "differ)"
                )
        return [found[query] for query in queries]
