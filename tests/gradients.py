"""Two optimizer steps on fixed episodes, and their gradients."""

import torch
from accelerate import Accelerator
from conftest import make_lm, make_tokenizer

from lld import settings
from lld.episode import Episode, Question, Turn, collate
from lld.policy import Policy
from lld.protocol import Passage
from lld.record.metrics import summarize_updates
from lld.record.monitor import describe
from lld.selection import choose_tokens, trained_rows
from lld.update import score_batch, update_policy

OPTIONS = {
    "rollout": {"num_questions": 4, "group_size": 3},
    "optim": {"updates_per_rollout": 2, "max_grad_norm": 1e9},
    "loss": {"kl_weight": 0.1, "entropy_weight": 0.01, "lld_weight": 0.5},
    "model": {"mixed_precision": "no"},
}


def make_episodes(num_rows: int, vocab_size: int) -> list[Episode]:
    """Ragged episodes of up to three actions with observations between; their log-probabilities are made
    up."""
    generator = torch.Generator().manual_seed(7)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    episodes = []
    for row in range(num_rows):
        question = Question(f"q/{row // 3}", "who?", ("a",), "q")
        episode = Episode(question, row % 3, [draw(2, vocab_size) for _ in range(draw(3, 9))])
        num_actions = draw(1, 4)
        for action in range(1, num_actions + 1):
            start, count, observed = len(episode.token_ids), draw(1, 12), draw(0, 8)
            for author, length in ((action, count), (0, observed)):
                episode.token_ids += [draw(2, vocab_size) for _ in range(length)]
                episode.action_ids += [author] * length
                episode.logprobs += [-1.0 if author else 0.0] * length
            kind = "search" if action < num_actions else ("answer", "invalid")[row % 2]
            content, tag_start = (
                ("a" if row % 4 else "b", start + count // 2) if kind != "invalid" else ("", start + count)
            )
            passages = (Passage("1", f'"T"\n{row % 2}', 1.0),) if kind == "search" else ()
            episode.turns.append(
                Turn(
                    start,
                    start + count,
                    start + count + observed,
                    kind,
                    content,
                    "stop_string",
                    tag_start,
                    passages,
                    0,
                    kind == "search",
                )
            )
        keep_some_ids(episode, vocab_size)
        episodes.append(episode)
    return episodes


def keep_some_ids(episode: Episode, vocab_size: int) -> None:
    """Makes up from 1 to 9 ids that the sampler kept for each token, the token among them."""
    generator = torch.Generator().manual_seed(len(episode.token_ids))
    for token, action in zip(episode.token_ids, episode.action_ids, strict=True):
        others = torch.randint(0, vocab_size, (int(action > 0) * 8,), generator=generator).tolist()
        own = sorted({token, *others[: token % 9]}) if action else []
        episode.kept_ids.extend(own)
        episode.kept_counts.append(len(own))


class Recorder:
    """An optimizer that keeps every gradient and takes a plain step, so that the second update starts
    elsewhere."""

    def __init__(self, parameters, lr: float):
        self.parameters, self.lr, self.gradients = list(parameters), lr, []

    def step(self):
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.parameters]).clone())
        with torch.no_grad():
            for p in self.parameters:
                p -= self.lr * p.grad

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


def two_steps(options: dict, micro_batch_size: int | None, advantages_PG=None):
    """(gradients of two updates, metrics) of `update_policy`, on this process's share of the rows; null:
    micro-batches as the options say."""
    options = {section: dict(values) for section, values in options.items()}
    if micro_batch_size is not None:
        options["optim"] = options["optim"] | {"micro_batch_size": micro_batch_size}
    cfg = settings.from_dict(options)
    accelerator = Accelerator(cpu=True)
    tokenizer = make_tokenizer()
    policy = accelerator.prepare(Policy(make_lm(tokenizer, scale=1.0)))
    reference = Policy(make_lm(tokenizer, seed=1, scale=1.0))
    if advantages_PG is None:
        advantages_PG = torch.tensor([[1.0, -0.5, -0.5], [0.0, 0.0, 0.0], [1.1, 0.1, -1.2], [-1.0, 0.5, 0.5]])
    episodes = make_episodes(advantages_PG.numel(), len(tokenizer))
    batch = collate(episodes, advantages_PG, tokenizer.pad_token_id, trained_rows(episodes, cfg.loss))
    batch = choose_tokens(accelerator, policy, batch, cfg)
    optimizer = Recorder(policy.parameters(), lr=0.05)
    update_rows, scores = update_policy(accelerator, policy, reference, optimizer, batch, cfg, beta=0.3)
    scores.final_BT = score_batch(accelerator, policy, batch, cfg)
    return (
        optimizer.gradients,
        summarize_updates(update_rows) | describe(batch, scores, episodes, cfg),
        accelerator,
    )
