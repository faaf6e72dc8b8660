"""Plays one question at a time on the engine and tools of training, and tells what happens as it happens."""

import torch
import transformers

from lld import protocol, rollout
from lld.ask.screen import Screen
from lld.config import Config
from lld.engine.engine import Engine, Stopped
from lld.episode import Question
from lld.evaluate import episode_record
from lld.evaluation.play import open_engine
from lld.model import load
from lld.retrieval import client
from lld.reward import gold_in_results
from lld.tools import Passage, Search


class Overheard:
    """An engine with one sequence, and its search; both tell the screen what passes through them."""

    def __init__(self, engine: Engine, search: Search, screen: Screen):
        self.engine, self.inner_search, self.screen = engine, search, screen
        self.specials = protocol.control_tokens(engine.tokenizer, added=False)
        self.told = False  # whether what was read after this turn is on the screen already

    def __getattr__(self, name: str):
        return getattr(self.engine, name)

    def step(self) -> list[Stopped]:
        stopped = self.engine.step()
        for sequence in self.engine.rows:
            self.screen.writes(self._decode(sequence.turn.token_ids), ended=bool(stopped))
        return stopped

    def search(self, queries: list[str]) -> list[list[Passage]]:
        found = self.inner_search(queries)
        for passages in found:
            self.screen.finds(passages)
        self.told = True
        return found

    def extend(self, key: tuple, token_ids: list[int], max_new_tokens: int) -> None:
        """Also shows what the model reads and no search has found, such as the corrective message."""
        if not self.told:
            self.screen.line("reads", self._decode(token_ids).strip(), "read")
        self.told = False
        self.engine.extend(key, token_ids, max_new_tokens)

    def _decode(self, token_ids: list[int]) -> str:
        return self.specials.sub("", protocol.decode(self.engine.tokenizer, token_ids))


class Agent:
    """A checkpoint with its tokenizer and search, ready to be asked.

    Raises ValueError where the checkpoint cannot be opened, and RetrieverError where no search answers.
    """

    def __init__(self, cfg: Config):
        transformers.utils.logging.disable_progress_bar()
        self.cfg = cfg
        self.tokenizer = load.load_tokenizer(cfg.model)
        protocol.check_observation_budget(
            self.tokenizer, cfg.retriever.topk, cfg.rollout.max_observation_tokens
        )
        client.check_health(cfg.retriever)
        self.search = client.make_search(cfg.retriever)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.engine = open_engine(cfg, self.tokenizer, device)
        self.num_asked = 0

    def reset(self) -> None:
        """A new engine with the same weights, after an episode that did not come to its end."""
        cfg = self.cfg
        self.engine = rollout.open_engine(self.engine.lm, self.tokenizer, cfg.rollout, cfg.eval)

    def play(self, text: str, screen: Screen | None) -> dict:
        """The record of one episode, shown on `screen` while it is played.

        Fields: question, answer (None without one), sources (titles of the passages read that contain the
        answer), num_searches, num_tokens, stop_reason, turns (as in eval.py's records). The same question
        with the same seed is answered alike only where it is asked as often: at a temperature above 0 a
        question asked again is a new sample.
        """
        cfg, question = self.cfg, Question("asked", text, (), "asked")
        rollout.check_prompts(self.tokenizer, [question], cfg.rollout.max_prompt_tokens)
        engine, search = self.engine, self.search
        if screen is not None:
            engine = Overheard(engine, search, screen)
            search = client.Search(engine.search, None, getattr(search, "luck", None))
        episodes = rollout.rollout(
            engine,
            self.tokenizer,
            [question],
            search,
            rollout.Budgets.of(cfg.rollout, cfg.eval.max_turns),
            num_samples=1,
            seed=cfg.run.seed,
            step=-1,
            repeats=[self.num_asked],
            empty_results="show",
        )
        self.num_asked += 1
        record = episode_record(self.tokenizer, episodes[0])
        return {
            "question": text,
            "answer": record["answer"],
            "sources": find_sources(record),
            "num_searches": record["num_searches"],
            "num_tokens": episodes[0].num_model_tokens,
            "stop_reason": record["stop_reason"],
            "turns": record["turns"],
        }


def find_sources(record: dict) -> list[str]:
    """The titles of the passages read that contain the answer, as whole words once normalised."""
    read = [text for turn in record["turns"] for text in turn["passages"]]
    titles = [text.partition("\n")[0].strip('"') for text in read]
    answer = record["answer"]
    if answer is None:
        return []
    found = [title for title, text in zip(titles, read, strict=True) if gold_in_results([answer], [text])]
    return list(dict.fromkeys(found))
