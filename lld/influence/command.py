"""Who displaced whom: what each episode's update does to the likelihood of the correct responses of its
group.

    python -m lld.influence --ckpt RUN/checkpoints/step_000040 --config RUN/config.yaml --out influence.json

lld/influence/closed_form.py has the formula, lld/influence/measured.py the check. All signs are those of the
paper's Delta: negative where likelihood falls.
"""

import argparse
import copy
import dataclasses
import json
import math
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from lld import files, settings
from lld.advantages import group_advantages
from lld.config import Config
from lld.data import load_questions, questions_of_step
from lld.engine.fit import check_fit
from lld.episode import Question, collate, searches_of
from lld.evaluation.options import options_of
from lld.influence.analysis import analyse_groups
from lld.influence.closed_form import Group
from lld.influence.measured import OPTIMIZERS, displace_each
from lld.influence.view import draw, print_case, print_conclusion, print_summary
from lld.model.folder import check_folder
from lld.model.load import load_lm, load_tokenizer
from lld.policy import Policy
from lld.record.runs import printable
from lld.retrieval.client import make_search
from lld.reward import check_own_reward, score_episodes
from lld.rollout import Budgets, check_prompts, open_engine, rollout
from lld.running import checkpoint
from lld.running.sharding import asked
from lld.tools import RetrieverError, Search

NO_TRAINING_STEP = -2  # selects the random numbers of these rollouts; -1 is evaluation's


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
