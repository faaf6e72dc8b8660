"""Which values and which combinations of options are refused, each with the value and the remedy."""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable
from operator import attrgetter

from lld.config import Config, Loss, TinyWorld

# Greater than 0, or null where the option admits it.
POSITIVE = (
    "loss.temperature",
    "run.steps",
    "run.save_every",
    "model.lora_alpha",
    "rollout.num_questions",
    "rollout.max_turns",
    "rollout.max_prompt_tokens",
    "rollout.max_new_tokens",
    "rollout.max_observation_tokens",
    "rollout.num_slots",
    "loss.constant_tokens",
    "loss.lld_answer_searches",
    "loss.sapo_tau_positive",
    "loss.sapo_tau_negative",
    "optim.updates_per_rollout",
    "optim.micro_batch_size",
    "optim.lr",
    "optim.max_grad_norm",
    "retriever.topk",
    "retriever.timeout_s",
    "retriever.deadline_s",
    "retriever.max_memory_gb",
    "eval.max_questions",
    "eval.max_turns",
    "eval.batch_size",
    "monitor.sentinel_size",
    "monitor.trajectories_questions",
    "plan.gpus",
    "plan.gpu_memory_gb",
    "plan.prompt_tokens",
    "plan.written_tokens",
    "plan.observation_tokens",
    "plan.kept_ids",
    "plan.tflops",
    "plan.bandwidth_gb_s",
    "plan.link_gb_s",
    "plan.host_gb_s",
    "plan.cpu_gb_s",
    "plan.efficiency",
    "tinyworld.num_people",
    "tinyworld.warm_start_steps",
    "tinyworld.num_layers",
    "tinyworld.hidden_size",
    "tinyworld.thought_words",
    "tinyworld.word_entropy",
)
NOT_NEGATIVE = (
    "run.seed",
    "run.keep_checkpoints",
    "run.watchdog_s",
    "model.lora_rank",
    "rollout.temperature",
    "rollout.top_k",
    "rollout.extra_draws",
    "loss.clip_low",
    "loss.clip_high",
    "loss.kl_weight",
    "loss.entropy_weight",
    "loss.lld_weight",
    "loss.lld_tolerance",
    "loss.lld_answer_weight",
    "loss.lld_lag_steps",
    "optim.warmup_steps",
    "optim.weight_decay",
    "retriever.retries",
    "retriever.rerank",
    "tinyworld.num_words",
    "eval.every",
    "eval.temperature",
    "monitor.rescore_every",
    "monitor.sentinel_every",
    "monitor.trajectories_every",
    "monitor.crash_box",
)
CLIP_KINDS = ("grpo", "gspo", "dual_clip", "gmpo", "cispo")  # values of loss.kind that read the clip's bounds
SHARES = ("high_entropy", "clip_cov", "kl_cov")  # rules of the loss whose number is a share of the tokens
MAX_SEED = 2**32 - 1  # the largest seed of numpy's generator
AT_MOST = {"run.seed": MAX_SEED, "tinyworld.seed": MAX_SEED, "run.watchdog_s": 1e7}
AT_MOST |= {"retriever.timeout_s": 1e7, "retriever.deadline_s": 1e7, "rollout.num_slots": 1e6}
AT_MOST |= {"optim.lr": 1, "plan.efficiency": 1}


def clip_bounds(options: Loss) -> tuple[float, float]:
    """Ratios below the first (where A < 0) and above the second (where A > 0) have no gradient."""
    if options.kind == "gmpo":
        return math.exp(-options.clip_low), math.exp(options.clip_high)
    if options.kind not in CLIP_KINDS or options.kind == "cispo":
        return 0.0, math.inf
    return 1 - options.clip_low, 1 + options.clip_high


def nearest(name: str, names: Iterable[str]) -> str:
    """The hint "did you mean 'x'?" where one of `names` is similar to `name`, else the list of them."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(names))}"


def check_name(name: str, where: str) -> None:
    """Raises ValueError unless `name` can name a file.

    It must not be empty or hidden, nor hold a separator or a control character.
    """
    if not re.fullmatch(r"[^\W_][\w.+-]{0,99}", name):
        raise ValueError(
            f"{where}: {name!r} cannot name a file: use letters, digits, '.', '_', '+' and '-', first a "
            "letter or digit, at most 100"
        )


def validate(cfg: Config) -> None:
    """Raises ValueError for a value out of range and for a combination of options without effect."""
    check_ranges(cfg)
    check_trackers(cfg)
    check_sampling(cfg)
    check_cut(cfg)
    check_budgets(cfg)
    check_batches(cfg)
    check_loss(cfg)
    check_surrogate(cfg)
    check_weights(cfg)
    check_correction(cfg)
    check_answer_weight(cfg)
    check_optimizer(cfg)
    check_adapters(cfg)
    check_reward(cfg)
    check_evaluation(cfg)
    check_retriever(cfg)
    check_fail_share(cfg)
    check_search_in_process(cfg)
    check_tinyworld(cfg)


def refuse_unread(cfg: Config, names: Iterable[str], unread: bool, why: str) -> None:
    """Raises ValueError where `unread` and one of the options `names` differs from its default."""
    for name in names:
        value = attrgetter(name)(cfg)
        if unread and value != attrgetter(name)(Config()):
            raise ValueError(f"{name} = {value!r} does nothing with {why}: drop one of the two")


def check_ranges(cfg: Config) -> None:
    for name in POSITIVE:
        value = attrgetter(name)(cfg)
        if value is not None and not value > 0:
            raise ValueError(f"{name} = {value}: must be greater than 0")
    for name in NOT_NEGATIVE:
        value = attrgetter(name)(cfg)
        if not value >= 0:
            raise ValueError(f"{name} = {value}: must not be negative")
    for name, most in AT_MOST.items():
        value = attrgetter(name)(cfg)
        if value > most:
            raise ValueError(f"{name} = {value}: must be at most {most:g}")
    if not cfg.run.dir:
        raise ValueError("run.dir is empty: name the folder that is to receive what the run writes")


def check_trackers(cfg: Config) -> None:
    run = cfg.run
    check_name(run.tracker_project, "run.tracker_project")
    refuse_unread(cfg, ["run.tracker_project"], not run.trackers, "run.trackers = []")
    names = ["run.tracker_name", "run.tracker_group", "run.tracker_tags"]
    refuse_unread(cfg, names, "wandb" not in run.trackers, "run.trackers without 'wandb', which reads it")


def check_sampling(cfg: Config) -> None:
    """Temperatures and top-p of training and of evaluation."""
    if cfg.rollout.temperature == 0:
        raise ValueError(
            "rollout.temperature = 0: greedy episodes of a group are all alike and teach nothing; "
            "use 1.0 (eval.temperature may be 0)"
        )
    for section in ("rollout", "eval"):
        top_p = getattr(cfg, section).top_p
        if not 0 < top_p <= 1:
            raise ValueError(f"{section}.top_p = {top_p}: must be in (0, 1]")
    refuse_unread(cfg, ["eval.top_p"], cfg.eval.temperature == 0, "eval.temperature = 0 (greedy)")


def check_cut(cfg: Config) -> None:
    """Options that cut what the sampler draws from, and losses that cannot know of it."""
    rollout, loss = cfg.rollout, cfg.loss
    if not 0 <= rollout.min_p < 1:
        raise ValueError(f"rollout.min_p = {rollout.min_p}: must be in [0, 1)")
    if rollout.top_k == 1:
        raise ValueError(
            "rollout.top_k = 1: greedy episodes of a group are all alike and teach nothing; use at least 2, "
            "or 0 for all ids"
        )
    cut = f"top_p = {rollout.top_p}, min_p = {rollout.min_p:g}, top_k = {rollout.top_k}"
    refuse_unread(cfg, ["loss.support"], not rollout.cuts, f"rollout.{cut}, which keep all ids")
    if loss.old_logprobs == "sampler" and rollout.cuts and loss.support == "full":
        raise ValueError(
            f"loss.old_logprobs = 'sampler' with rollout.{cut}: the sampler's log-probabilities are those of "
            "the cut distribution and no ratio to the whole one can be built on them; use loss.support "
            "'kept', old_logprobs 'trainer' or top_p 1.0, min_p 0 and top_k 0"
        )
    if loss.old_logprobs == "sampler" and loss.temperature not in (None, rollout.temperature):
        raise ValueError(
            f"loss.old_logprobs = 'sampler' with rollout.temperature = {rollout.temperature} and "
            f"loss.temperature = {loss.temperature}: the ratio of two temperatures would not begin at 1, and "
            "the clip would act on the difference; use old_logprobs 'trainer', or one temperature"
        )


def check_budgets(cfg: Config) -> None:
    """Token budgets of an episode."""
    rollout = cfg.rollout
    one_turn = rollout.max_new_tokens + rollout.max_observation_tokens
    if one_turn > rollout.max_episode_tokens - 1:
        raise ValueError(
            f"rollout.max_new_tokens + rollout.max_observation_tokens = {one_turn} leave no room for a "
            f"prompt and a second turn in rollout.max_episode_tokens = {rollout.max_episode_tokens}"
        )
    if rollout.max_episode_tokens <= rollout.max_prompt_tokens:
        raise ValueError(
            f"rollout.max_episode_tokens = {rollout.max_episode_tokens}: must exceed "
            f"rollout.max_prompt_tokens = {rollout.max_prompt_tokens}"
        )


def check_batches(cfg: Config) -> None:
    """How a step's episodes divide into groups and updates, also after groups were dropped."""
    rollout, updates = cfg.rollout, cfg.optim.updates_per_rollout
    if rollout.group_size < 2:
        raise ValueError(
            f"rollout.group_size = {rollout.group_size}: a group of one has no advantage to learn from; "
            "use 2 or more"
        )
    num_rows = rollout.num_questions * rollout.group_size
    if num_rows % updates:
        raise ValueError(
            f"rollout.num_questions x rollout.group_size = {num_rows} episodes do not divide into "
            f"optim.updates_per_rollout = {updates} equal mini-batches"
        )
    if not 0 <= rollout.max_failed_groups < 1:
        raise ValueError(
            f"rollout.max_failed_groups = {rollout.max_failed_groups}: must be in [0, 1), a share of the "
            "step's groups"
        )
    num_droppable = int(rollout.max_failed_groups * rollout.num_questions)
    fewest = (rollout.num_questions - num_droppable) * rollout.group_size
    if fewest < updates:
        raise ValueError(
            f"rollout.max_failed_groups = {rollout.max_failed_groups} may leave {fewest} episodes of a "
            f"step, fewer than optim.updates_per_rollout = {updates}: lower one of the two"
        )


def check_loss(cfg: Config) -> None:
    loss = cfg.loss
    refuse_unread(cfg, ["loss.kl_estimator"], loss.kl_weight == 0, "loss.kl_weight = 0")
    if loss.lld_weight > 0 and cfg.optim.updates_per_rollout == 1 and loss.lld_lag_steps == 0:
        raise ValueError(
            "loss.lld_weight > 0 with optim.updates_per_rollout = 1 and loss.lld_lag_steps = 0 cannot act: "
            "at the only update the policy still is the old policy and no likelihood has fallen yet; "
            "use more updates per rollout, lld_lag_steps >= 1, or lld_weight 0"
        )
    names = [field.name for field in dataclasses.fields(Loss)]
    of_lld = [f"loss.{name}" for name in names if name.startswith("lld_") and name != "lld_weight"]
    refuse_unread(cfg, of_lld, loss.lld_weight == 0, "loss.lld_weight = 0")


def check_surrogate(cfg: Config) -> None:
    """Options that only some rules for ratio, clip and mean, and some advantages, read."""
    loss, advantage = cfg.loss, cfg.advantage
    kind, taus = f"loss.kind = {loss.kind!r}", ["loss.sapo_tau_positive", "loss.sapo_tau_negative"]
    bounds = ["loss.clip_low", "loss.clip_high"]
    refuse_unread(cfg, bounds, loss.kind not in CLIP_KINDS, kind)
    refuse_unread(cfg, ["loss.clip_dual"], loss.kind != "dual_clip", kind)
    refuse_unread(cfg, taus, loss.kind != "sapo", kind)
    mean = f"loss.aggregation = {loss.aggregation!r}"
    refuse_unread(cfg, ["loss.constant_tokens"], loss.aggregation != "constant", mean)
    if loss.clip_low > 1 and loss.kind not in ("cispo", "gmpo"):
        raise ValueError(f"loss.clip_low = {loss.clip_low}: at most 1, which clips no ratio from below")
    if loss.kind == "dual_clip" and loss.clip_dual <= 1 + loss.clip_high:
        raise ValueError(f"loss.clip_dual = {loss.clip_dual}: must exceed 1 + loss.clip_high")
    if loss.kind in ("gspo", "gmpo") and loss.aggregation == "constant":
        raise ValueError(
            f"{kind} with loss.aggregation = 'constant': its ratio is a mean over the response, whose length "
            "a sum of tokens would bring back; use 'sequence_mean'"
        )
    estimator = f"advantage.kind = {advantage.kind!r}"
    if advantage.kind == "signed" and cfg.rollout.extra_draws:
        raise ValueError(
            f"rollout.extra_draws = {cfg.rollout.extra_draws} with advantage.kind = 'signed': there groups "
            "of equal rewards teach as well; drop one of the two"
        )
    refuse_unread(cfg, ["advantage.normalize_std"], advantage.kind != "grpo", estimator)
    refuse_unread(cfg, ["advantage.stratum_weight"], advantage.kind != "stratified", estimator)
    if not 0 <= advantage.stratum_weight <= 1:
        raise ValueError(f"advantage.stratum_weight = {advantage.stratum_weight}: must be in [0, 1]")


def check_weights(cfg: Config) -> None:
    """Numbers of loss.weights and loss.penalties, and what leaves nothing to train on."""
    loss = cfg.loss
    for option in ("weights", "penalties"):
        for name, number in getattr(loss, option).items():
            if number < 0:
                raise ValueError(f"loss.{option}.{name} = {number}: must not be negative")
            if name in SHARES and not 0 < number < 1:
                raise ValueError(f"loss.{option}.{name} = {number}: a share of the tokens, must be in (0, 1)")
    if loss.weights.get("positives") == 0 and loss.weights.get("negatives") == 0:
        raise ValueError(
            "loss.weights positives = 0 with negatives = 0 leave no policy term: drop one of the two"
        )
    if "nthr" in loss.weights and loss.support == "kept":
        raise ValueError(
            "loss.weights nthr with loss.support = 'kept': its scores are those of the softmax over the "
            "whole vocabulary; use 'full'"
        )
    moves = cfg.optim.updates_per_rollout > 1 or loss.old_logprobs == "sampler"
    for option, name in (("weights", "off_policy"), ("penalties", "kl_cov")):
        if name in getattr(loss, option) and not moves:
            raise ValueError(
                f"loss.{option} {name} with optim.updates_per_rollout = 1 cannot act: at the only update the "
                "policy still is the old policy; use more updates per rollout or loss.old_logprobs sampler"
            )


def check_correction(cfg: Config) -> None:
    """Importance weights for the gap between sampler and trainer."""
    loss = cfg.loss
    bounds = ["loss.correction_cap", "loss.correction_floor"]
    refuse_unread(cfg, bounds, loss.correction == "none", "loss.correction = 'none'")
    if not 0 <= loss.correction_floor < loss.correction_cap:
        raise ValueError(
            f"loss.correction_floor = {loss.correction_floor} with loss.correction_cap = "
            f"{loss.correction_cap}: must satisfy 0 <= floor < cap"
        )
    if loss.correction != "none" and loss.old_logprobs == "sampler":
        raise ValueError(
            f"loss.correction = {loss.correction!r} with loss.old_logprobs = 'sampler' would correct twice: "
            "the ratio already divides by the sampler's log-probabilities; use 'trainer' or correction none"
        )
    if loss.correction != "none" and loss.kind == "vespo":
        raise ValueError(
            f"loss.correction = {loss.correction!r} with loss.kind = 'vespo': VESPO's own weight decides how "
            "far a response counts, and a factor beside it undoes that; use correction none, or 'sampler' "
            "for loss.old_logprobs"
        )


def check_answer_weight(cfg: Config) -> None:
    """Options of beta, LLDS-MA's weight on answer tokens, under each schedule."""
    loss = cfg.loss
    schedule, reads_searches = loss.lld_answer_schedule, loss.lld_answer_schedule == "paper"
    why = f"loss.lld_answer_schedule = {schedule!r}"
    refuse_unread(cfg, ["loss.lld_answer_weight"], reads_searches, f"{why}, which reads lld_answer_searches")
    refuse_unread(cfg, ["loss.lld_answer_searches"], not reads_searches, why)
    if schedule == "constant" and loss.lld_answer_weight > 1:
        raise ValueError(f"loss.lld_answer_weight = {loss.lld_answer_weight}: beta lies in [0, 1]")


def check_optimizer(cfg: Config) -> None:
    optim, longest = cfg.optim, cfg.rollout.max_episode_tokens
    by_tokens = optim.micro_batch_tokens is not None
    why = f"optim.micro_batch_tokens = {optim.micro_batch_tokens}"
    refuse_unread(cfg, ["optim.micro_batch_size"], by_tokens, why)
    if by_tokens and optim.micro_batch_tokens < longest:
        raise ValueError(
            f"optim.micro_batch_tokens = {optim.micro_batch_tokens}: must hold the longest episode, "
            f"rollout.max_episode_tokens = {longest}; null counts rows instead (micro_batch_size)"
        )
    stays = f"optim.name = {optim.name!r}, which keeps the moments in CPU memory all the time"
    refuse_unread(cfg, ["optim.cpu_in_rollout"], optim.name == "adamw_offload", stays)
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise ValueError(f"optim.betas = {list(optim.betas)}: must be two numbers in [0, 1)")


def check_adapters(cfg: Config) -> None:
    """Options of LoRA adapters, and what they exclude."""
    model = cfg.model
    adapted = f"model.lora_rank = {model.lora_rank}"
    refuse_unread(cfg, ["model.lora_alpha", "model.lora_targets"], model.lora_rank == 0, adapted)
    if not model.lora_targets or len(set(model.lora_targets)) < len(model.lora_targets):
        raise ValueError(
            f"model.lora_targets = {list(model.lora_targets)}: name at least one matrix, each only once"
        )
    why = f"{adapted}: the optimizer holds only the adapters, which are small"
    refuse_unread(cfg, ["optim.name", "optim.cpu_in_rollout"], model.lora_rank > 0, why)
    refuse_unread(cfg, ["rollout.weights"], model.lora_rank > 0, f"{adapted}, whose copy shares weights")
    if model.lora_rank > 0 and cfg.monitor.crash_box:
        raise ValueError(
            f"monitor.crash_box = {cfg.monitor.crash_box} with {adapted}: a box holds whole models, so that "
            "it can be replayed elsewhere; set it to 0, or train all weights (model.lora_rank=0)"
        )


def check_reward(cfg: Config) -> None:
    kind = cfg.reward.kind
    if ":" in kind and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", kind):
        raise ValueError(f"reward.kind = {kind!r}: write package.module:function")
    of_format = ["reward.structure_format_score", "reward.final_format_score", "reward.retrieval_score"]
    refuse_unread(cfg, of_format, cfg.reward.kind != "format", f"reward.kind = {cfg.reward.kind!r}")
    most, cache, rollout = cfg.reward.overlong_max, cfg.reward.overlong_cache, cfg.rollout
    written = min((rollout.max_turns + 1) * rollout.max_new_tokens, rollout.max_episode_tokens)
    if (most or cache) and not 0 < cache <= most < written + cache:
        raise ValueError(
            f"reward.overlong_max = {most} with reward.overlong_cache = {cache}: must satisfy 0 < cache <= "
            f"max, and max - cache < {written}, the tokens that rollout's budgets let an episode write; both "
            "0 punish nothing"
        )


def check_evaluation(cfg: Config) -> None:
    for name in cfg.eval.benchmarks:
        check_name(name, "eval.benchmarks")
    for name in cfg.eval.during_training:
        if name not in cfg.eval.benchmarks:
            raise ValueError(f"eval.during_training names {name!r}: {nearest(name, cfg.eval.benchmarks)}")


def check_retriever(cfg: Config) -> None:
    """Options of the retriever; also called when an index folder has named its backend."""
    options = cfg.retriever
    backend = f"retriever.backend = {options.backend!r}"
    refuse_unread(cfg, ["retriever.replicas"], options.url is None, "retriever.url = null")
    for name, reader in {
        "retriever.dtype": "torch",
        "retriever.faiss_params": "faiss",
        "retriever.rerank": "faiss",
        "retriever.oracle_questions": "oracle",
    }.items():
        refuse_unread(cfg, [name], options.backend not in (reader, None), backend)
    finds_always = options.url is None and options.replay is None and options.backend not in ("faiss", None)
    why = f"{backend} in this process, which finds something for every query"
    refuse_unread(cfg, ["retriever.empty_results"], finds_always, why)
    replays = options.replay is not None
    refuse_unread(cfg, ["retriever.record"], replays, f"retriever.replay = {options.replay!r}")
    if options.backend == "oracle" and options.oracle_questions is None:
        raise ValueError(
            "retriever.backend = 'oracle' needs retriever.oracle_questions: "
            "the questions whose gold answers it is to find"
        )


def check_fail_share(cfg: Config) -> None:
    options = cfg.retriever
    if not 0 <= options.fail_share < 1:
        raise ValueError(
            f"retriever.fail_share = {options.fail_share}: must be in [0, 1), a share of the episodes"
        )
    if options.fail_share and options.corpus is None:
        raise ValueError(
            f"retriever.fail_share = {options.fail_share} needs retriever.corpus, from which the passages of "
            "failed searches are drawn"
        )


def check_search_in_process(cfg: Config) -> None:
    options = cfg.retriever
    if options.url is None and options.corpus is None and options.replay is None:
        raise ValueError(
            "retriever.url is null, so the search runs in this process and needs retriever.corpus "
            "(and retriever.index, unless backend is bm25)"
        )


def check_tinyworld(cfg: Config) -> None:
    world = cfg.tinyworld
    names = [f"tinyworld.{field.name}" for field in dataclasses.fields(TinyWorld) if field.name != "dir"]
    refuse_unread(cfg, names, world.dir is None, "tinyworld.dir = null")
    if world.num_people < 20:
        raise ValueError(
            f"tinyworld.num_people = {world.num_people}: too small for distractors; use 20 or more"
        )
    of_words = ["tinyworld.thought_words", "tinyworld.word_entropy", "tinyworld.thought_spread"]
    refuse_unread(cfg, of_words, world.num_words == 0, "tinyworld.num_words = 0")
    if world.num_words and not world.word_entropy < math.log(world.num_words):
        raise ValueError(
            f"tinyworld.word_entropy = {world.word_entropy}: {world.num_words} words (tinyworld.num_words) "
            f"have less than log {world.num_words} = {math.log(world.num_words):.2f} nats"
        )
    if world.num_words and not 0 <= world.thought_spread < world.thought_words:
        raise ValueError(
            f"tinyworld.thought_spread = {world.thought_spread}: must be in [0, {world.thought_words}), "
            "below tinyworld.thought_words, so that every thought has a word"
        )
    for name in ("namesake_share", "two_hop_share"):
        share = getattr(world, name)
        if not 0 <= share <= 1:
            raise ValueError(f"tinyworld.{name} = {share}: must be in [0, 1]")
