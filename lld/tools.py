"""The agent's tools, and how they fail.

A search that fails raises `RetrieverError` after bounded retries within a deadline. It never becomes an empty
passage, which the policy would learn from: the rollout marks the episodes, and their groups are dropped. An
empty list is an answer: nothing was found (`retriever.empty_results`).
"""


class Unplayed(RuntimeError):
    """A rollout or an evaluation that could not be played to its end; nothing was trained on it."""


class RetrieverError(Unplayed):
    """The retriever did not answer as it must; the message names its url, the attempts, the last reason and
    the remedy."""


class Unreachable(RetrieverError):
    """No connection, or one that broke."""


class TimedOut(RetrieverError):
    """No whole reply in time."""


class ServerFault(RetrieverError):
    """A reply of status 5xx, or 429 (too busy)."""


class Malformed(RetrieverError):
    """A reply that is not one list of passages, which may be empty, for every query."""


class Refused(RetrieverError):
    """Any other status: the request itself is wrong, and asking again would not mend it."""
