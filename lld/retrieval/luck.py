"""A control: a search tool that fails on a share of the episodes, so that no policy answers everything.

A failed search shows passages like any other, but random ones without a gold answer: only their content tells
an unlucky episode from a lucky one.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from lld.reward import gold_in_results
from lld.tools import Passage

SPARE = 20  # passages drawn besides topk, to replace those that hold a gold answer


@dataclass(frozen=True)
class Luck:
    """Which episodes are unlucky, and what their searches find.

    share: of the episodes, in [0, 1). draw: (queries, number of passages) -> passages drawn at random for
    each query, always the same ones for the same query. topk: passages that a search finds at most.
    """

    share: float
    draw: Callable[[list[str], int], list[list[Passage]]]
    topk: int

    def fails(self, seed: int) -> bool:
        """Whether the episode with this seed (`rollout.episode_seed`) is unlucky; a pure function of both."""
        digest = hashlib.blake2b(f"luck/{seed}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.share * 2**64

    def find(self, query: str, seed: int, turn: int, golden_answers: Sequence[str]) -> list[Passage]:
        """What the query of an unlucky episode's given turn finds.

        Fewer than `topk` passages only where nearly all of the corpus holds a gold answer.
        """
        [drawn] = self.draw([f"{seed}/{turn} {query}"], self.topk + SPARE)
        without_gold = (p for p in drawn if not gold_in_results(golden_answers, [p.contents]))
        return list(islice(without_gold, self.topk))
