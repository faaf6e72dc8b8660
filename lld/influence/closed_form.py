"""Who displaced whom: what each episode's update does to the likelihood of the correct responses of its
group.

    python -m lld.influence --ckpt RUN/checkpoints/step_000040 --config RUN/config.yaml --out influence.json

The first-order influence is a closed form at the LM head (paper, Thm. 4.2; NTHR, arXiv 2505.18830). A token's
residual is g = e_y - pi(.|context). At the first update of a rollout (ratio 1, LLDS 0) the policy gradient of
token m with respect to the head's weights is -c_m g_m h_m^T / temperature, where c_m is its advantage times
its share of the loss, and so a step of plain gradient descent changes the log-probability of token n by

    lr c_m <g_n, g_m> <h_n, h_m> / temperature^2        to first order, h = the last hidden state before the
      token.

"The head alone" is the head as an untied copy: what the step does to the embeddings and to the layers below
is left out. `true_change` measures what was left out. All signs are those of the paper's Delta: negative
where likelihood falls.
"""

import argparse
import copy
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn.functional import one_hot

from lld import files, settings
from lld.advantages import group_advantages
from lld.config import Config, Loss
from lld.data import load_questions, questions_of_step
from lld.episode import Batch, Episode, Question, collate, searches_of
from lld.evaluation.options import options_of
from lld.influence.view import compare, draw, print_case, print_conclusion, print_summary, readable
from lld.model.folder import check_folder
from lld.model.lm_head import token_scores
from lld.model.load import check_fit, load_lm, load_tokenizer
from lld.policy import Policy
from lld.protocol import PARTS
from lld.record.monitor import first_passages
from lld.record.runs import printable
from lld.retrieval.client import make_search
from lld.reward import check_own_reward, score_episodes
from lld.rollout import Budgets, check_prompts, open_engine, rollout
from lld.running import checkpoint
from lld.running.sharding import asked
from lld.tools import RetrieverError, Search
from lld.update import loss_of, score_batch, trained_temperature, update_counts, update_policy
from lld.weights import AGGREGATIONS

CHUNK = 256  # tokens whose residuals over the vocabulary are in memory at once, twice
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
NO_TRAINING_STEP = -2  # selects the random numbers of these rollouts; -1 is evaluation's
# Learning rates of the small steps. transformers' RMSNorm always computes in float32: the effect of smaller
# steps would be lost in its rounding
HEAD_LR, MODEL_LR = 1e-6, 1e-4


@dataclass(frozen=True)
class Group:
    """The episodes of one question, as many as there are rows in `batch`."""

    episodes: list[Episode]
    batch: Batch

    @property
    def right(self) -> list[int]:
        """The rows of the correct responses: those with A > 0, as in all metrics."""
        return (self.batch.advantages_B > 0).nonzero()[:, 0].tolist()


@dataclass(frozen=True)
class Tokens:
    """The N tokens that the model wrote in a group, row by row.

    Of each: the hidden state before it, its id, and its row and column in the batch.
    """

    states_NC: torch.Tensor
    targets_N: torch.Tensor
    row_N: torch.Tensor
    column_N: torch.Tensor

    def of(self, rows: list[int]) -> torch.Tensor:
        """Indices of the tokens of some rows, in order."""
        return torch.isin(self.row_N, torch.tensor(rows, device=self.row_N.device)).nonzero()[:, 0]


@torch.no_grad()
def read_tokens(policy: Policy, batch: Batch) -> Tokens:
    """The model's tokens of a group with their last hidden states, on the policy's device."""
    part = batch.rows(list(range(len(batch.names))), next(policy.parameters()).device)
    scored_BT = part.action_ids_BT > 0
    return Tokens(*policy.states(part.token_ids_BT, scored_BT), *scored_BT.nonzero(as_tuple=True))


def loss_shares(batch: Batch, options: Loss) -> torch.Tensor:
    """(B,) float64 c of the closed form: a row's advantage times the weight of its tokens in the loss.

    See `update.loss_of`.
    """
    counts = update_counts(batch, list(range(len(batch.names))), "nonnegative")
    lengths_B = (batch.action_ids_BT > 0).sum(1)
    return AGGREGATIONS[options.aggregation](batch.advantages_B.double(), lengths_B, counts, options)


@torch.no_grad()
def pair_influence(
    tokens: Tokens,
    head: torch.nn.Module,
    shares_B: torch.Tensor,
    right: list[int],
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """(M, N) change of log p of correct token m by token n's loss term, in nats per unit of learning rate.

    `right`: rows of the correct responses; M counts their tokens, in the order of `tokens`. Residuals are
    recomputed chunk by chunk, so that at most two chunks over the vocabulary are in memory.
    """
    heard_M = tokens.of(right)
    pairs_MN = tokens.states_NC.new_zeros(len(heard_M), len(tokens.row_N))

    def residuals(index_n):
        logits_nV = head(tokens.states_NC[index_n]) / temperature
        return one_hot(tokens.targets_N[index_n], logits_nV.shape[1]) - logits_nV.softmax(1)

    for place_m in torch.arange(len(heard_M), device=heard_M.device).split(chunk):
        heard_m = heard_M[place_m]
        residual_mV = residuals(heard_m)
        for index_n in torch.arange(len(tokens.row_N), device=heard_M.device).split(chunk):
            alike_mn = (residual_mV @ residuals(index_n).T) * (
                tokens.states_NC[heard_m] @ tokens.states_NC[index_n].T
            )
            pairs_MN[place_m[:, None], index_n] = (
                alike_mn * shares_B.to(alike_mn)[tokens.row_N[index_n]] / temperature**2
            )
    return pairs_MN


def influence_matrix(
    pairs_MN: torch.Tensor, tokens: Tokens, right: list[int], num_rows: int
) -> dict[str, torch.Tensor]:
    """{"total", "raising", "lowering"}: (G, R) sums over the token pairs of member g and correct response r.

    Over all pairs, over the positive and over the negative ones.
    """
    member_NG = one_hot(tokens.row_N, num_rows).to(pairs_MN)
    right_MR = member_NG[tokens.of(right)][:, right]

    def fold(values_MN: torch.Tensor) -> torch.Tensor:
        return (right_MR.T @ values_MN @ member_NG).T

    return {
        "total": fold(pairs_MN),
        "raising": fold(pairs_MN.clamp(min=0)),
        "lowering": fold(pairs_MN.clamp(max=0)),
    }


def place(group: Group, tokens: Tokens, n: int, tokenizer) -> dict:
    """Token n for the report: its episode, turn (from 1), part, offset in the response, and text."""
    row, column = int(tokens.row_N[n]), int(tokens.column_N[n])
    turn, part = (
        int(group.batch.action_ids_BT[row, column]),
        PARTS[int(group.batch.part_ids_BT[row, column]) - 1],
    )
    return {
        "sample": row,
        "turn": turn,
        "part": part,
        "offset": column - len(group.episodes[row].prompt_ids),
        "text": tokenizer.decode([int(tokens.targets_N[n])]),
    }


def strongest_pairs(
    pairs_MN: torch.Tensor,
    group: Group,
    tokens: Tokens,
    tokenizer,
    member: int,
    response: int,
    count: int = 8,
) -> dict:
    """The influence of one member on one correct response.

    The `count` most lowering and most raising token pairs, and the sums by part and turn.
    """
    on_m, of_n = tokens.of([response]), tokens.of([member])
    block_mn = pairs_MN[torch.isin(tokens.of(group.right), on_m)][:, of_n]
    heard, said = ([place(group, tokens, n, tokenizer) for n in some.tolist()] for some in (on_m, of_n))
    order = block_mn.flatten().argsort().tolist()
    values = block_mn.flatten().tolist()

    def pair(index: int) -> dict:
        return {"value": values[index], "of": said[index % len(said)], "on": heard[index // len(said)]}

    parts = {}
    for m, row in enumerate(block_mn.tolist()):
        for n, value in enumerate(row):
            key = (f"{said[n]['part']} {said[n]['turn']}", f"{heard[m]['part']} {heard[m]['turn']}")
            parts[key] = parts.get(key, 0.0) + value
    return {
        "lowering": [pair(index) for index in order[:count] if values[index] < 0],
        "raising": [pair(index) for index in order[::-1][:count] if values[index] > 0],
        "parts": [
            {"of": of, "on": on, "value": value}
            for (of, on), value in sorted(parts.items(), key=lambda item: item[1])
        ],
        "by_token": [
            token | {"value": value} for token, value in zip(heard, block_mn.sum(1).tolist(), strict=True)
        ],
    }


def true_change(
    score: Callable[[], torch.Tensor], parameters: list[torch.Tensor], batch: Batch, cfg: Config, lr: float
) -> torch.Tensor:
    """(G, N) change of the log-probabilities by an SGD step on each member's loss, per unit of learning rate.

    `score()` gives the N tokens' log-probabilities (N,) under `parameters`, which are restored after every
    step. The loss is the real one (`update.loss_of`) of the group as one optimizer step, its policy term
    alone; `lr` must be small enough to be linear.
    """
    options, rows = policy_term_alone(cfg), list(range(len(batch.names)))
    part = batch.rows(rows, parameters[0].device)
    counts = update_counts(batch, rows, options.loss.lld_preserve)
    kept = [tensor.detach().clone() for tensor in parameters]
    change_GN = []
    for row in rows:
        before_N = score()
        logprobs_BT = before_N.new_zeros(part.token_ids_BT.shape).masked_scatter(
            part.action_ids_BT > 0, before_N
        )
        losses_B, _ = loss_of(
            part, logprobs_BT, None, logprobs_BT.detach(), None, None, counts, 1.0, options.loss
        )
        gradients = torch.autograd.grad(losses_B[row], parameters, allow_unused=True)
        with torch.no_grad():
            for tensor, gradient in zip(parameters, gradients, strict=True):
                tensor -= 0.0 if gradient is None else lr * gradient
            change_GN.append((score() - before_N.detach()) / lr)
            for tensor, value in zip(parameters, kept, strict=True):
                tensor.copy_(value)
    return torch.stack(change_GN)


def policy_term_alone(cfg: Config) -> Config:
    """The options of one update by the policy gradient alone, while the policy is still the old one."""
    off = {"kl_weight": 0.0, "entropy_weight": 0.0, "lld_weight": 0.0, "weights": {}, "penalties": {}}
    loss = dataclasses.replace(cfg.loss, old_logprobs="trainer", correction="none", drop=(), **off)
    return dataclasses.replace(cfg, loss=loss, optim=dataclasses.replace(cfg.optim, updates_per_rollout=1))


def head_alone(
    policy: Policy, tokens: Tokens, temperature: float
) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """`score` and `parameters` of `true_change` for an untied copy of the head on the states as they are."""
    head = copy.deepcopy(policy.lm.get_output_embeddings())
    return lambda: token_scores(tokens.states_NC, head, tokens.targets_N, temperature, False)[0], [
        head.weight
    ]


def whole_model(
    policy: Policy, batch: Batch, temperature: float
) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """`score` and `parameters` of `true_change` for all weights, tied as they are."""
    parameters = list(policy.parameters())
    part = batch.rows(list(range(len(batch.names))), parameters[0].device)
    scored_BT = part.action_ids_BT > 0
    return lambda: policy(part.token_ids_BT, scored_BT, temperature)[0][scored_BT], parameters


def displace_each(
    accelerator: Accelerator, policy, groups: list[Group], cfg: Config, optimizer: str, lr: float
) -> list[dict]:
    """The protocol of Fig. 3a: one update per group, from the same weights, on its episodes alone.

    Lowest `delta` first. `delta`: mean over the correct responses of the change of their log-likelihood (a
    sum over tokens); `delta_per_token`: their mean change per token. The optimizer starts without moments;
    gradients are clipped as in training; the KL term is left out.
    """
    kept, bars = copy.deepcopy(policy.state_dict()), []
    for group in groups:
        _, scores = update_policy(
            accelerator,
            policy,
            None,
            OPTIMIZERS[optimizer](policy.parameters(), lr=lr),
            group.batch,
            policy_term_alone(cfg),
            beta=1.0,
        )
        final_BT = score_batch(accelerator, policy, group.batch, cfg)
        policy.load_state_dict(kept)
        change_R = (final_BT - scores.old_BT)[group.right].double().sum(1)
        question = group.episodes[0].question
        num_tokens = int((group.batch.action_ids_BT[group.right] > 0).sum())
        bars.append(
            {
                "question": question.id,
                "text": question.text,
                "num_right": len(group.right),
                "delta": float(change_R.mean()),
                "delta_per_token": float(change_R.sum()) / num_tokens,
            }
        )
    return sorted(bars, key=lambda bar: bar["delta"])


def play(lm, tokenizer, questions: list[Question], search: Search, cfg: Config) -> list[Group]:
    """The groups of `questions`, all played with the current weights.

    Dropped are groups whose rewards are all equal, which have no gradient, and, as in training, those with a
    search that found nothing.
    """
    options = cfg.rollout
    episodes = rollout(
        open_engine(lm.eval(), tokenizer, options, options),
        tokenizer,
        questions,
        search,
        Budgets.of(options),
        num_samples=options.group_size,
        seed=cfg.run.seed,
        step=NO_TRAINING_STEP,
        empty_results=cfg.retriever.empty_results,
        overlap_search=options.overlap_search,
    )
    rewards_PG = torch.tensor(score_episodes(episodes, tokenizer, cfg.reward)).view(
        len(questions), options.group_size
    )
    searches_PG = searches_of(episodes, rewards_PG)
    advantages_PG = group_advantages(rewards_PG, cfg.advantage, searches_PG)
    groups = [
        (episodes[p * options.group_size : (p + 1) * options.group_size], advantages_PG[p])
        for p in range(len(questions))
    ]
    return [
        Group(some, collate(some, advantages_G[None], tokenizer.pad_token_id))
        for some, advantages_G in groups
        if (advantages_G != 0).any() and not any(episode.failure for episode in some)
    ]


def analyse(exact: Policy, group: Group, tokenizer, cfg: Config, measure: bool) -> dict:
    """One group as plain JSON types.

    Its responses, the matrices, the true changes if `measure`, and the look-alike pair of lowest influence.
    `exact` is the policy in float64.
    """
    tokens, right, temperature = read_tokens(exact, group.batch), group.right, trained_temperature(cfg)
    pairs_MN = pair_influence(
        tokens,
        exact.lm.get_output_embeddings(),
        loss_shares(group.batch, cfg.loss),
        right,
        temperature,
    )
    matrices = influence_matrix(pairs_MN, tokens, right, len(group.episodes))
    if measure:
        per_response_NR = one_hot(tokens.row_N, len(group.episodes)).double()[:, right]
        head = head_alone(exact, tokens, temperature)
        matrices["true_head"] = true_change(*head, group.batch, cfg, HEAD_LR) @ per_response_NR
        model = whole_model(exact, group.batch, temperature)
        matrices["true_model"] = true_change(*model, group.batch, cfg, MODEL_LR) @ per_response_NR
    matrix = {name: values_GR.tolist() for name, values_GR in matrices.items()}
    pair = look_alike_pair(group, matrix["total"])
    if pair is not None:
        pair |= strongest_pairs(pairs_MN, group, tokens, tokenizer, pair["member"], pair["response"])
    question = group.episodes[0].question
    responses = [
        {"advantage": advantage, "answer": episode.answer, "text": readable(episode, tokenizer)}
        for episode, advantage in zip(group.episodes, group.batch.advantages_B.tolist(), strict=True)
    ]
    return {
        "question": question.id,
        "text": question.text,
        "golden_answers": list(question.golden_answers),
        "responses": responses,
        "right": right,
        "matrix": matrix,
        "pair": pair,
    }


def look_alike_pair(group: Group, total: list[list[float]]) -> dict | None:
    """The wrong answer and correct response of lowest influence whose first searches found the same passages.

    The paper's case study. None if no such influence is negative.
    """
    found = [first_passages(episode) for episode in group.episodes]
    alike = [
        (total[member][r], member, response)
        for member, episode in enumerate(group.episodes)
        for r, response in enumerate(group.right)
        if group.batch.advantages_B[member] < 0
        and episode.answer is not None
        and found[member] is not None
        and found[member] == found[response]
    ]
    if not alike or min(alike)[0] >= 0:
        return None
    value, member, response = min(alike)
    return {"member": member, "response": response, "value": value}


def load_options(args: argparse.Namespace) -> Config:
    """The checked options of the run, with the checkpoint and the group size of the command line."""
    check_folder(str(args.ckpt), "--ckpt", hub=False)
    cfg = options_of(args.ckpt, args.config, args.overrides)
    if (args.ckpt / "manifest.json").is_file():
        checkpoint.check(args.ckpt)
    if args.questions < 1:
        raise ValueError(f"--questions {args.questions}: must be 1 or more")
    if args.checks < 0:
        raise ValueError(f"--checks {args.checks}: must be 0 or more")
    if args.lr is not None and not 0 < args.lr < math.inf:
        raise ValueError(f"--lr {args.lr}: must be a finite number above 0")
    if asked("FSDP"):
        raise ValueError(
            "lld.influence analyses a whole model in one process: start it without an FSDP configuration "
            "of accelerate"
        )
    return dataclasses.replace(
        cfg,
        model=dataclasses.replace(cfg.model, path=str(args.ckpt)),
        rollout=dataclasses.replace(cfg.rollout, group_size=args.group_size),
        # The closed form is that of the whole softmax
        loss=dataclasses.replace(cfg.loss, support="full"),
    )


def analyse_groups(exact: Policy, groups: list[Group], tokenizer, cfg: Config, checks: int) -> dict:
    """All groups, the agreement with the true changes, and the case shown.

    True changes are measured for the first `checks` groups and for the case: the group with the strongest
    look-alike pair.
    """
    analyses = [analyse(exact, group, tokenizer, cfg, index < checks) for index, group in enumerate(groups)]
    agreements = compare(analyses)
    strengths = [analysis["pair"]["value"] if analysis["pair"] else 0.0 for analysis in analyses]
    shown = strengths.index(min(strengths))
    if "true_model" not in analyses[shown]["matrix"]:
        analyses[shown] = analyse(exact, groups[shown], tokenizer, cfg, True)
    return {"agreement": agreements, "case": analyses[shown], "groups": analyses}


def influence(args: argparse.Namespace) -> dict:
    """Plays the groups and analyses them; returns the figures as plain JSON types.

    Raises ValueError for a mistake of the user and RetrieverError if the search fails.
    """
    cfg = load_options(args)
    check_own_reward(cfg.reward)
    tokenizer, lm = load_tokenizer(cfg.model), load_lm(cfg.model)
    check_fit(lm, tokenizer, cfg.rollout.max_episode_tokens)
    training = load_questions(cfg.data.train, split=cfg.data.train_split, sources=cfg.data.train_sources)
    questions = questions_of_step(training, 0, min(args.questions, len(training)), cfg.run.seed)
    check_prompts(tokenizer, questions, cfg.rollout.max_prompt_tokens)
    # In half precision such small changes would be rounded away
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no")
    policy = accelerator.prepare_model(Policy(lm))
    print(f"playing {len(questions)} training questions, {args.group_size} episodes each", flush=True)
    groups = play(lm, tokenizer, questions, make_search(cfg.retriever), cfg)
    if not groups:
        raise ValueError(
            f"no group of the {len(questions)} questions has both rewards: ask more (--questions) or "
            "larger groups (--group-size)"
        )
    checks = min(args.checks, len(groups))
    print(f"{len(groups)} groups have mixed rewards; measuring true changes in {checks}", flush=True)
    analysed = analyse_groups(Policy(copy.deepcopy(lm).double()), groups, tokenizer, cfg, args.checks)
    lr = cfg.optim.lr if args.lr is None else args.lr
    bars = displace_each(accelerator, policy, groups, cfg, args.optimizer, lr)
    negative = sum(bar["delta"] < 0 for bar in bars)
    return {
        "checkpoint": str(args.ckpt),
        "num_questions": len(questions),
        "group_size": args.group_size,
        "optimizer": args.optimizer,
        "lr": lr,
        "agreement": analysed["agreement"],
        "case": analysed["case"],
        "num_negative": negative,
        "negative_share": negative / len(bars),
        "bars": bars,
        "groups": analysed["groups"],
    }


def out_file(args: argparse.Namespace) -> Path:
    """The file to write the figures to; its folder is created.

    In a run's folder, which may be somebody else's, no link is followed.
    """
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        return args.out
    if args.ckpt.parent.name != "checkpoints":
        return Path("influence.json")
    out = args.ckpt.parent.parent / "influence" / f"{args.ckpt.name}.json"
    out.parent.mkdir(exist_ok=True)
    for path in (out.parent, out, out.with_suffix(".png")):
        if path.is_symlink():
            raise ValueError(f"{path} is a link: delete it, or choose another --out")
    return out


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lld.influence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ckpt", type=Path, required=True, metavar="DIR", help="checkpoint folder with model and tokenizer"
    )
    parser.add_argument(
        "--config",
        metavar="YAML",
        help="the run's configuration; default: RUN/config.yaml of a checkpoint RUN/checkpoints/step_N",
    )
    parser.add_argument(
        "--questions",
        type=int,
        default=50,
        metavar="N",
        help="first N questions of the run's order (the paper's 50)",
    )
    parser.add_argument(
        "--group-size", type=int, default=8, metavar="G", help="episodes a question (the paper's 8)"
    )
    parser.add_argument(
        "--checks",
        type=int,
        default=10,
        metavar="N",
        help="groups whose true changes are measured, besides the one shown",
    )
    parser.add_argument(
        "--optimizer", choices=sorted(OPTIMIZERS), default="adamw", help="of the one update of Fig. 3a"
    )
    parser.add_argument("--lr", type=float, help="its learning rate; default: optim.lr")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.json",
        help="everything as JSON, and the figure beside it as PNG; default: RUN/influence/step_N.json, or "
        "influence.json here for a checkpoint that is in no run",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, 2 for a mistake of the user, 3 for a failed search, 7 for a full disk."""
    try:
        settings.refuse_dashes(sys.argv[1:] if argv is None else argv)
        args = make_parser().parse_intermixed_args(argv)
        out = out_file(args)
        figures = influence(args)
        print_conclusion(figures)
        print_case(figures["case"])
        print_summary(figures)
        out.write_text(json.dumps(figures, indent=1) + "\n")
        draw(figures, out.with_suffix(".png"))
    except (ValueError, RetrieverError) as error:
        print(f"lld.influence: {printable(error)}", file=sys.stderr)
        return 3 if isinstance(error, RetrieverError) else 2
    except OSError as error:
        if error.errno not in files.DISK_ERRORS:
            raise
        print(f"lld.influence: {printable(error)}: make room or choose another --out", file=sys.stderr)
        return 7
    print(f"\nwritten to {out} and {out.with_suffix('.png')}")
    return 0
