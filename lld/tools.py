"""The table of the agent's tools, and the errors of a tool that fails.

A search that fails raises `RetrieverError` after bounded retries within a deadline. It never becomes an empty
passage, which the policy would learn from: the rollout marks the episodes, and their groups are dropped. An
empty list is a valid reply: nothing was found (`retriever.empty_results`).
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Passage:
    """One retrieved document; `contents` is '"Title"\\ntext' as in Search-R1's wiki-18.jsonl."""

    id: str
    contents: str
    score: float = 0.0


# Maps queries to the passages found for each.
Search = Callable[[list[str]], list[list[Passage]]]


@dataclass(frozen=True)
class Tool:
    """A tool: the model writes `<tag> query </tag>` and reads the results in an <information> block.

    run: queries of several episodes, and the run's search function -> a list of results for each query. A
        result is a Passage or a string. Called in one thread or, with rollout.overlap_search, in several.
    render: one result and its rank, from 1 -> the text that the model reads. Protocol tags in it are made
        harmless, and what exceeds the observation's budget is cut, by `protocol.render_observation`.
    """

    tag: str
    run: Callable[[list[str], Search], list[list]]
    render: Callable[[object, int], str]


def run_search(queries: list[str], search: Search) -> list[list[Passage]]:
    return search(queries)


def render_passage(passage: Passage, rank: int) -> str:
    """One passage as the model reads it: 'Doc 1(Title: "A") text\\n' (Search-R1's `_passages2string`)."""
    title, _, text = passage.contents.partition("\n")
    return f"Doc {rank}(Title: {title}) {text}\n"


# The name of a tool is the kind of its actions in episodes, logs and on the report page. Stop strings, the
# ids of response parts, the format reward's grammar and the metrics follow from this table.
TOOLS = {
    "search": Tool(tag="search", run=run_search, render=render_passage),
}


class Unplayed(RuntimeError):
    """A rollout or an evaluation that could not be completed; nothing was trained on it."""


class RetrieverError(Unplayed):
    """The retriever gave no valid reply.

    The message names its url, the number of attempts, the last reason and the remedy.
    """


class Unreachable(RetrieverError):
    """The connection failed or broke off."""


class TimedOut(RetrieverError):
    """No complete reply before the timeout."""


class ServerFault(RetrieverError):
    """A reply of status 5xx, or 429 (too busy)."""


class Malformed(RetrieverError):
    """A reply without exactly one list of passages, possibly empty, for every query."""


class Refused(RetrieverError):
    """Any other status: the request itself is wrong, and repeating it would not help."""
