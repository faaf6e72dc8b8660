"""Retrievers that serve as experimental controls: random passages, no passages, gold passages.

Each answers every query, so a run with one of them differs from a run with a real index only in the passages.
"""

import hashlib

import numpy as np

from lld.data import load_questions
from lld.protocol import Passage
from lld.retrieval.bm25 import WORD, build_bm25
from lld.retrieval.corpus import Corpus
from lld.reward import quotable

NOTHING = Passage("control:empty", '"Control"\nThis search engine finds nothing, on purpose.')
NUM_CANDIDATES = 100  # passages that the oracle searches for answers


class RandomSearch:
    """Passages drawn at random, seeded by the query. Tests whether the content of the passages matters."""

    backend, encoder = "random", None

    def __init__(self, corpus: Corpus):
        self.corpus = corpus

    def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        def draw(query):
            return np.random.default_rng(
                int.from_bytes(hashlib.blake2b(query.encode(), digest_size=8).digest(), "big")
            )

        return [
            [
                self.corpus[int(row)]
                for row in draw(query).choice(len(self.corpus), min(topk, len(self.corpus)), replace=False)
            ]
            for query in queries
        ]


class EmptySearch:
    """One fixed passage which says that nothing is found. Tests whether searching matters.

    It is a passage on purpose: a failed search and an empty result never produce one, so this control cannot
    be mistaken for either. No group is dropped for it, whatever `retriever.empty_results` is.
    """

    backend, encoder = "empty", None

    def __init__(self, corpus: Corpus):
        self.corpus = corpus

    def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        return [[NOTHING] for _ in queries]


class OracleSearch:
    """Passages that contain a gold answer. An upper bound on what search can contribute.

    The query is matched to the nearest known question: by equal text, else by BM25. Of the NUM_CANDIDATES
    best passages (or topk, if larger) for that question and its answers together, those that contain an
    answer as whole words come first, then the others, each in BM25's order. Answers that no passage quotes,
    such as "yes", do not count; where all are such, the passages are those for the question alone, with its
    supporting titles first.
    """

    backend, encoder = "oracle", None

    def __init__(self, words, corpus: Corpus, questions_path: str):
        """words: a BM25Search of the corpus."""
        self.words, self.corpus = words, corpus
        self.questions = load_questions(questions_path)
        texts = [question.text for question in self.questions]
        self.nearest = build_bm25(_Texts(texts))
        self.by_text = {text.strip().lower(): number for number, text in enumerate(texts)}

    @property
    def known(self) -> list[tuple]:
        """All of the questions that the results depend on, for the index fingerprint."""
        return [(asked.text, asked.golden_answers, asked.supporting_titles) for asked in self.questions]

    def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        return [self._search_one(query, topk) for query in queries]

    def _search_one(self, query: str, topk: int) -> list[Passage]:
        number = self.by_text.get(query.strip().lower())
        if number is None:
            number = int(
                np.argmax(
                    self.nearest.get_scores_from_ids(self.nearest.get_tokens_ids(WORD.findall(query.lower())))
                )
            )
        question = self.questions[number]
        answers = quotable(question.golden_answers)
        golds = [spaced for gold in answers if (spaced := _spaced(gold)).strip()]

        def is_wanted(passage: Passage) -> bool:
            if answers:
                return any(gold in _spaced(passage.contents) for gold in golds)
            return passage.contents.partition("\n")[0].strip('"') in question.supporting_titles

        [found] = self.words.search([" ".join([question.text, *answers])], max(topk, NUM_CANDIDATES))
        # The sort is stable: within both groups BM25's order is kept.
        found.sort(key=lambda passage: not is_wanted(passage))
        return found[:topk]


class _Texts(list):
    """A list of texts that `build_bm25` can read like a corpus."""

    path = "the questions"

    def contents(self, start: int, end: int):
        return iter(self[start:end])


def _spaced(text: str) -> str:
    return " " + " ".join(WORD.findall(text.lower())) + " "
