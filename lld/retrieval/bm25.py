"""Search by words: BM25 (Lucene's formula, k1 0.9, b 0.4).

A word is a run of letters, digits and underscores, in lower case. There is no stemming and there are no stop
words: both would damage made-up names. Ties are in corpus order, and passages that share no word with the
query fill up the list with score 0.
"""

import re
from pathlib import Path

import bm25s
import numpy as np
from tqdm import tqdm

from lld.protocol import Passage
from lld.retrieval.corpus import Corpus, count_hits, take_hits
from lld.retrieval.index import BUILD, VERIFY_BYTES

WORD = re.compile(r"\w+")


def build_bm25(corpus: Corpus) -> bm25s.BM25:
    """The BM25 index of a corpus (Lucene's formula, k1 0.9 and b 0.4 as in Pyserini)."""
    vocabulary: dict[str, int] = {}
    word_ids = []
    texts = tqdm(
        corpus.contents(0, len(corpus)), total=len(corpus), desc="reading words", disable=len(corpus) < 10_000
    )
    for contents in texts:
        words = WORD.findall(contents.lower())
        ids = (vocabulary.setdefault(word, len(vocabulary)) for word in words)
        word_ids.append(np.fromiter(ids, np.int32, len(words)))
    if not vocabulary:
        raise ValueError(f"{corpus.path} holds no word: BM25 has nothing to match")
    index = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
    index.index((word_ids, vocabulary), create_empty_token=False, show_progress=False)
    return index


def open_bm25(folder: Path, corpus: Corpus) -> bm25s.BM25:
    """The BM25 index of an index folder, memory-mapped.

    ValueError if its files do not fit each other and the corpus.
    """
    remedy = f"delete the folder and build it again (`{BUILD}`)"
    damaged = (OSError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
    try:
        index = bm25s.BM25.load(folder / "bm25", mmap=True, show_progress=False)
        fits = _fits(index, len(corpus))
    except damaged as error:
        raise ValueError(
            f"{folder / 'bm25'} is damaged ({type(error).__name__}: {error}): {remedy}"
        ) from None
    if not fits:
        raise ValueError(
            f"{folder / 'bm25'} is damaged: its files do not fit each other, or not {len(corpus)} "
            f"passages; {remedy}"
        )
    return index


def _fits(index: bm25s.BM25, num_passages: int) -> bool:
    """Whether the arrays of an index agree with each other, its words and the number of passages."""
    starts, rows, data = index.scores["indptr"], index.scores["indices"], index.scores["data"]
    words = list(index.vocab_dict.values())
    if not (len(data) == len(rows) == int(starts[-1]) and not starts[0] and (np.diff(starts) >= 0).all()):
        return False
    if words and (min(words) < 0 or max(words) >= len(starts) - 1):
        return False
    # A larger index is not checked: that would read all of the mapped file.
    if len(rows) and rows.nbytes <= VERIFY_BYTES and (rows.min() < 0 or rows.max() >= num_passages):
        return False
    return index.scores["num_docs"] == num_passages


class BM25Search:
    """Search by words; the same query always gives the same passages in the same order."""

    backend = "bm25"
    encoder = None

    def __init__(self, index: bm25s.BM25, corpus: Corpus):
        self.index, self.corpus = index, corpus

    def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        num_hits = count_hits(self.corpus, topk)
        return [self._search_one(query, num_hits) for query in queries]

    def _search_one(self, query: str, num_hits: int) -> list[Passage]:
        scores_N = self.index.get_scores_from_ids(self.index.get_tokens_ids(WORD.findall(query.lower())))
        cut = np.partition(scores_N, -num_hits)[-num_hits]
        above = np.flatnonzero(scores_N > cut)
        # Among equal scores bm25s's own top-k may return any rows; this takes the first ones.
        equal = np.flatnonzero(scores_N == cut)[: num_hits - len(above)]
        rows = np.concatenate([above, equal])
        rows = rows[np.argsort(-scores_N[rows], kind="stable")]
        return take_hits(self.corpus, rows, scores_N[rows])
