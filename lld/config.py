"""Options, declared as frozen dataclasses; settings.py loads, checks and saves them.

The defaults are the paper's Qwen2.5-3B run (arXiv 2512.04220v2, B.2.1): a YAML states only departures.
`python -m lld.config [SECTION | SECTION.OPTION]` prints every option with its default, type and meaning: the
comment above it or beside it.
"""

import ast
import dataclasses
import difflib
import io
import json
import sys
import textwrap
import tokenize
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

# The matrices of a decoder layer that may have LoRA adapters
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BENCHMARKS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wiki", "musique", "bamboogle")


def keys_of(module: str, table: str) -> tuple[str, ...]:
    """The keys of the literal dict `table` in lld/`module`, which are the values an option accepts.

    They are read from the source without importing it: options are checked before torch is imported.
    """
    tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == table for target in targets):
            return tuple(ast.literal_eval(key) for key in node.value.keys)
    raise AssertionError(f"lld/{module}.py has no literal dict {table}")


PRESETS = Path(__file__).parents[1] / "configs" / "presets"


@dataclass(frozen=True)
class Run:
    dir: str = "runs/3b"  # everything a run writes
    seed: int = 0  # of questions' order, episodes and whatever else is drawn
    # Rollout steps; each makes optim.updates_per_rollout optimizer steps
    steps: int = 1005
    save_every: int = 50  # steps between checkpoints
    # Newest checkpoints to keep, besides the best on held-out questions; 0 keeps all
    keep_checkpoints: int = 3
    # Seconds without a new phase, a finished episode or a forward pass after which a process exits; 0 never
    watchdog_s: float = 1800.0
    # Trackers of accelerate: "tensorboard", "wandb", …
    trackers: tuple[str, ...] = ()
    # Their project; of TensorBoard the folder in run.dir
    tracker_project: str = "lld"
    # Of Weights & Biases: the run's name; null: run.dir's last part
    tracker_name: str | None = None
    tracker_group: str | None = None  # of the run, where the tracker has groups
    tracker_tags: tuple[str, ...] = ()  # of the run, where the tracker has tags
    # Use deterministic kernels (slower on a GPU); warn about operations that have none. Flash attention's
    # backward pass, in bf16, is not made deterministic: torch does so only where it may refuse the others
    deterministic: bool = False


@dataclass(frozen=True)
class Model:
    path: str = "Qwen/Qwen2.5-3B"  # hub name or folder
    # Type of the computations on a GPU. Weights are float32; with adapters the others are of this type
    mixed_precision: Literal["no", "bf16"] = "bf16"
    # Compute activations again in the backward pass: slower, less memory
    gradient_checkpointing: bool = True
    trust_remote_code: bool = False  # run code that the model's folder or hub page brings
    # Rank of LoRA adapters: only they are trained and saved, and the model itself is the reference of the KL
    # term. 0 trains all weights
    lora_rank: int = 0
    # An adapter's product is multiplied by lora_alpha / lora_rank
    lora_alpha: float = 32.0
    # The matrices that get an adapter
    lora_targets: tuple[Literal[LORA_TARGETS], ...] = LORA_TARGETS


@dataclass(frozen=True)
class Data:
    # Hub name, parquet (Search-R1) or jsonl (FlashRAG)
    train: str = "PeterJinGo/nq_hotpotqa_train"
    train_split: str = "train"  # of a data set on the hub, or of a folder
    # Only questions with one of these values of `data_source`; empty keeps all
    train_sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rollout:
    num_questions: int = 512  # questions per step, over all processes
    group_size: int = 5  # episodes per question
    # Turns that may search; a last turn without search follows
    max_turns: int = 3
    max_prompt_tokens: int = 2048  # longer prompts are refused, never cut
    max_new_tokens: int = 500  # per turn
    max_observation_tokens: int = 500  # read after each turn; longer passages are cut
    # Prompt, actions and observations together
    max_episode_tokens: int = 4096
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # sample from the likeliest ids that together have this probability
    min_p: float = 0.0  # sample from ids of at least this share of the largest probability
    top_k: int = 0  # sample from this number of likeliest ids; 0 keeps all
    # Weights that are sampled with: the trainer's | a copy of them, in every rollout rounded to fewer bits
    # and stored as before (fp8 e4m3 and int8: matrices of the layers, one scale a row); not in evaluations
    weights: Literal[("trainer",) + keys_of("model/coarse", "COARSE")] = "trainer"
    # Sequences decoded together on each process; `train.py --plan` prints the size of their KV cache
    num_slots: int = 128
    # Dynamic sampling: how often a step may draw num_questions more while fewer groups than that differ in
    # reward; 0 trains on all groups
    extra_draws: int = 0
    # Share of a step's groups that may be dropped because a search failed; above it the run stops
    max_failed_groups: float = 0.1
    # Replay decode steps as CUDA graphs, captured anew in every rollout; no effect on a CPU. Tested only
    # with CUDA calls replaced by stubs.
    cuda_graphs: bool = False
    # Continue decoding while searches run; false makes the schedule, and so the last bits, repeatable
    overlap_search: bool = True

    @property
    def cuts(self) -> bool:
        """Whether some ids can never be drawn."""
        return self.top_p < 1 or self.min_p > 0 or self.top_k > 0


@dataclass(frozen=True)
class Reward:
    # A name, or package.module:function for a reward of one's own (lld/reward.py, `own_reward`)
    kind: Literal[keys_of("reward", "ANSWER_SCORES") + ("format",)] | str = "em"
    # Kind "format" (values of Search-R1 v0.3): the reward of a wrong answer in valid format, and what a right
    # one in invalid format loses
    structure_format_score: float = 0.2
    final_format_score: float = 0.1  # kind "format": a wrong answer in invalid format
    # Kind "format": added in valid format, where a passage holds a gold answer
    retrieval_score: float = 0.0
    # DAPO's soft overlong punishment: the reward falls by up to 1 over the last overlong_cache of the
    # overlong_max tokens that an episode may write; dynamic sampling does not see it. 0 and 0: none
    overlong_max: int = 0
    overlong_cache: int = 0  # DAPO: 4096 of 20480


@dataclass(frozen=True)
class Advantage:
    # How scores of a group become advantages
    kind: Literal[keys_of("advantages", "ADVANTAGES")] = "grpo"
    # Divide kind grpo by the group's standard deviation; false is Dr. GRPO's
    normalize_std: bool = True
    # Share of the normalisation among episodes with as many searches, of kind stratified; no published value
    # was found
    stratum_weight: float = 0.5


@dataclass(frozen=True)
class Loss:
    # A published method: options of configs/presets/NAME.yaml, which those of the config file replace; given
    # on the command line, the preset replaces the file's
    preset: Literal[("none", *sorted(path.stem for path in PRESETS.glob("*.yaml")))] = "none"
    # Rule for ratio and clip; docs/losses.md lists these and the rules below
    kind: Literal[keys_of("loss", "SURROGATES")] = "grpo"
    # How terms become the loss: mean of the responses' means (Eq. 1) | mean over all tokens (official code) |
    # sums / constant_tokens (Dr. GRPO)
    aggregation: Literal[keys_of("weights", "AGGREGATIONS")] = "sequence_mean"
    # Tokens by which aggregation constant divides the sum of a response
    constant_tokens: float = 500.0
    # At negative advantages, ratios below 1 - clip_low get no gradient; kinds cispo and gmpo bound otherwise
    clip_low: float = 0.2
    # At positive advantages, ratios above 1 + clip_high get none; kinds cispo and gmpo as above
    clip_high: float = 0.2
    # Bound of kind dual_clip on ratios where A < 0
    clip_dual: float = 3.0
    sapo_tau_positive: float = 1.0  # steepness of kind sapo's gate where A > 0
    sapo_tau_negative: float = 1.05  # steepness of kind sapo's gate where A <= 0
    kl_weight: float = 0.001  # of the KL divergence to the start policy; 0 loads no reference model
    # How that divergence is estimated from the sampled tokens
    kl_estimator: Literal[keys_of("loss", "KL_ESTIMATORS")] = "k3"
    # Rules that multiply policy terms, each with its number: {positives: 0.1}
    weights: dict[Literal[keys_of("weights", "WEIGHTS")], float] = field(default_factory=dict)
    # Rules that add a term, each with its number: {nll: 0.1}
    penalties: dict[Literal[keys_of("loss", "PENALTIES")], float] = field(default_factory=dict)
    # Episodes left out of the loss
    drop: tuple[Literal[keys_of("selection", "FILTERS")], ...] = ()
    entropy_weight: float = 0.0  # official code: 0.001
    # Whose log pi_old the ratio divides by; LLDS and the displacement metrics always use the trainer's
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    # Temperature of the probabilities that are trained and recorded; null: rollout.temperature
    temperature: float | None = None
    # Ids that they are normalised over: the vocabulary | the ids that top_p, min_p or top_k kept when the
    # token was sampled (arXiv 2512.02556), the same for ratio, KL, entropy and LLDS
    support: Literal["full", "kept"] = "full"
    # Weights of the policy terms for a sampler other than the trainer: the ratios pi_old / sampler of a token
    # or of a response, truncated (tis) or masked (mis)
    correction: Literal[("none",) + keys_of("weights", "CORRECTIONS")] = "none"
    # Larger ratios are cut to it (tis) or get weight 0 (mis)
    correction_cap: float = 2.0
    # Smaller ratios are raised to it (tis) or get weight 0 (mis)
    correction_floor: float = 0.0
    lld_weight: float = 0.2  # lambda; 0 is plain GRPO
    # Where LLDS acts: at tokens, actions or responses whose log-likelihood has fallen
    lld_gate: Literal[keys_of("loss", "GATES")] = "action"
    # Episodes whose likelihood LLDS preserves, by the sign of their advantage
    lld_preserve: Literal["nonnegative", "positive"] = "nonnegative"
    # Fall in log-likelihood that LLDS ignores, in nats a token; bf16 rounding alone causes .001
    lld_tolerance: float = 0.0
    # What LLDS is divided by: the tokens of preserved rows (paper) | all trained tokens (official code)
    lld_normalizer: Literal["preserved", "all"] = "preserved"
    # How beta, the weight on answer tokens, is computed
    lld_answer_schedule: Literal["constant", "paper", "code"] = "constant"
    # beta if "constant"; the slope lambda_answer / lambda of "code"
    lld_answer_weight: float = 1.0
    # V_B of "paper": beta = min(V / V_B, 1)
    lld_answer_searches: float = 2.0
    # LLDS compares with the policy of this many rollout steps ago; 0 is this rollout's
    lld_lag_steps: int = 0


@dataclass(frozen=True)
class Optim:
    # Moments in float32 | in 8 bits (bitsandbytes) | in CPU memory, together with the float32 weights
    name: Literal["adamw", "adamw_8bit", "adamw_offload"] = "adamw"
    lr: float = 1e-6  # learning rate after the warm-up
    warmup_steps: int = 286  # rollout steps of linear warm-up
    updates_per_rollout: int = 10  # optimizer steps on the episodes of one rollout
    # Rows in one forward pass on one process; changes memory use, never the gradient
    micro_batch_size: int = 16
    # Tokens (prompts and observations included) in one forward pass, in place of micro_batch_size;
    # null counts rows
    micro_batch_tokens: int | None = None
    betas: tuple[float, ...] = (0.9, 0.999)  # of Adam
    weight_decay: float = 0.01  # of AdamW
    max_grad_norm: float = 1.0  # larger gradients are scaled down to it
    # Move the optimizer's moments to CPU memory during rollouts and evaluations
    cpu_in_rollout: bool = False


@dataclass(frozen=True)
class Retriever:
    # null searches in this process
    url: str | None = "http://127.0.0.1:8000"
    # Further servers of the same index: they share the load and replace one that fails
    replicas: tuple[str, ...] = ()
    timeout_s: float = 30.0  # of one attempt
    deadline_s: float = 120.0  # of a search with all its attempts
    retries: int = 3  # after the first attempt of a search
    topk: int = 3  # passages for each query
    # A query that finds nothing drops its question's group | shows an empty block, as in Search-R1;
    # evaluation always shows it
    empty_results: Literal["drop", "show"] = "drop"
    # Share of episodes, drawn for each one, whose searches all find random passages without a gold answer
    fail_share: float = 0.0
    # File to which every query and its passages are written
    record: str | None = None
    # Such a file, from which queries are answered in place of a server or an index
    replay: str | None = None

    # Folder made by `python -m lld.retrieval build`, or a FAISS file. This option and those after it are read
    # by retriever_server.py, and by this process where url is null
    index: str | None = None
    corpus: str | None = None  # jsonl of {"id", "contents"}
    encoder: str = "intfloat/e5-base-v2"  # of queries and passages; hub name or folder
    # null: the one that the index folder was built for; faiss for a file
    backend: (
        Literal[("faiss", "torch", "bm25") + keys_of("retrieval/backends", "OF_CORPUS") + ("oracle",)] | None
    ) = None
    dtype: Literal["float16", "int8"] = "float16"  # of backend torch
    # FAISS's search parameters, such as "nprobe=64"; empty keeps the index's own
    faiss_params: str = ""
    # Candidates of a FAISS index to score again with the vectors on disk
    rerank: int = 0
    # jsonl or parquet of questions whose answers backend oracle finds
    oracle_questions: str | None = None
    device: Literal["auto", "cpu"] = "auto"  # auto: all GPUs, if there are any
    # Refuse an index that needs more memory than this; null: more than is free
    max_memory_gb: float | None = None


@dataclass(frozen=True)
class Eval:
    every: int = 50  # steps between evaluations while training; 0 never
    at_start: bool = True  # also before the first step
    # Held-out questions: hub name, parquet or jsonl by name of the benchmark
    benchmarks: dict[str, str] = field(
        default_factory=lambda: {
            name: f"RUC-NLPIR/FlashRAG_datasets/{'2wikimultihopqa' if name == '2wiki' else name}"
            for name in BENCHMARKS
        }
    )
    # Benchmarks that training evaluates on
    during_training: tuple[str, ...] = ("nq", "hotpotqa")
    max_questions: int = 500  # of each set in training; eval.py takes all
    # The paper's; four turns of full length exceed rollout.max_episode_tokens 4096
    max_turns: int = 4
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # as rollout.top_p
    batch_size: int = 256  # questions of a process between two writes of eval.py


@dataclass(frozen=True)
class Monitor:
    # Steps between re-scorings of a rollout after its last update (the paper's Def. 4.1); 0 never
    rescore_every: int = 5
    # Steps between re-scorings of correct episodes kept from the start; 0 never
    sentinel_every: int = 10
    sentinel_size: int = 64  # episodes
    # Steps between logs of whole groups, token by token; 0 never
    trajectories_every: int = 10
    trajectories_questions: int = 4  # groups in such a log
    # Save and stop when this phase or a later one begins: flattening (2), spiral (3), collapse (4); 0 never
    stop_in_phase: Literal[0, 2, 3, 4] = 0
    # Rollouts kept for a crash box, which is written when flattening, spiral or collapse begins; 0 none
    crash_box: int = 0


@dataclass(frozen=True)
class Plan:
    """What `train.py --plan` assumes; a run reads none of it."""

    # Processes, one on each GPU; null: as many as the launcher started
    gpus: int | None = None
    # Memory of one GPU in 10^9 bytes; null: that of the GPU here
    gpu_memory_gb: float | None = None
    # Whether weights, gradients and optimizer are sharded over GPUs; launcher: as accelerate is configured
    shard: Literal["launcher", "fsdp", "none"] = "launcher"
    prompt_tokens: int = 200  # of an episode
    written_tokens: int = 300  # by the model, in an episode
    observation_tokens: int = 1000  # read from searches, in an episode
    # Ids kept per written token with loss.support "kept"; thousands where the text has much entropy
    kept_ids: int = 20
    tflops: float = 989.0  # of a GPU in bf16; an H100's
    bandwidth_gb_s: float = 3350.0  # of a GPU's memory; an H100's
    link_gb_s: float = 400.0  # between GPUs, each way
    host_gb_s: float = 25.0  # between a GPU and CPU memory
    cpu_gb_s: float = 100.0  # of CPU memory
    efficiency: float = 0.4  # share of tflops and bandwidth reached


@dataclass(frozen=True)
class TinyWorld:
    """A made-up world written to `dir` before training starts; with `dir` null, data is real."""

    dir: str | None = None  # folder of the world, made if it is not there
    seed: int = 0  # of people, passages and questions
    num_people: int = 160  # passages and questions grow with it
    # People who share a name with another, so that no policy answers everything
    namesake_share: float = 0.1
    two_hop_share: float = 0.6  # of the questions that need two searches
    # Vocabulary of the free wording of thoughts; 0: thoughts are a few fixed sentences
    num_words: int = 0
    # Free words of a thought, on average
    thought_words: int = 8
    # Entropy of a free word given the word before, in nats
    word_entropy: float = 2.0
    # A thought has up to this many words more or less
    thought_spread: int = 1
    warm_start_steps: int = 600  # of supervised training on demonstrations
    num_layers: int = 2  # of the policy
    hidden_size: int = 128  # of the policy


@dataclass(frozen=True)
class Config:
    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    advantage: Advantage = Advantage()
    loss: Loss = field(default_factory=Loss)
    optim: Optim = Optim()
    retriever: Retriever = Retriever()
    eval: Eval = field(default_factory=Eval)
    monitor: Monitor = Monitor()
    plan: Plan = Plan()
    tinyworld: TinyWorld = TinyWorld()


def meanings() -> dict[str, str]:
    """What each option means, by its full name: the comment lines right above it and beside it."""
    text = Path(__file__).read_text(encoding="utf-8")
    comments = {
        token.start[0]: (token.string.lstrip("# "), token.line.lstrip().startswith("#"))
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    sections, found = {field.type.__name__: field.name for field in dataclasses.fields(Config)}, {}
    for node in ast.parse(text).body:
        for item in node.body if isinstance(node, ast.ClassDef) and node.name in sections else ():
            if not isinstance(item, ast.AnnAssign):
                continue
            first = item.lineno
            while comments.get(first - 1, ("", False))[1]:
                first -= 1
            parts = [comments[line][0] for line in range(first, item.end_lineno + 1) if line in comments]
            found[f"{sections[node.name]}.{item.target.id}"] = " ".join(parts)
    return found


def type_text(kind: type) -> str:
    """A type as a reader of YAML would name it."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else type_text(arg) for arg in args)
    if origin is tuple:
        return f"list of {type_text(args[0])}"
    if origin is dict:
        return f"{{name: {type_text(args[1])}}}"
    return "text" if kind is str else kind.__name__


def value_text(value: object) -> str:
    """A default as YAML would have it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {text}" for name, text in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return json.dumps(value) if value is None or value == "" or isinstance(value, bool) else str(value)


def describe(wanted: str) -> str:
    """The options of a section, one option, or all of them (""), as text; ValueError for an unknown name."""
    told, defaults = meanings(), Config()
    chosen = [name for name in told if wanted in ("", name, name.split(".")[0])]
    if not chosen:
        names = [*told, *(section.name for section in dataclasses.fields(Config))]
        same = [name for name in told if name.split(".")[1] == wanted.split(".")[-1]]
        near = same or difflib.get_close_matches(wanted, names, n=3)
        known = ", ".join(section.name for section in dataclasses.fields(Config))
        hint = f"did you mean {' or '.join(near)}?" if near else f"sections: {known}"
        raise ValueError(f"no section or option {wanted!r}: {hint}")
    lines = []
    for name in chosen:
        section, option = name.split(".")
        options = getattr(defaults, section)
        kind = typing.get_type_hints(type(options))[option]
        lines.append(f"{name} = {value_text(getattr(options, option))}    ({type_text(kind)})")
        lines += textwrap.wrap(told[name], 90, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    try:
        if len(argv) > 1:
            raise ValueError("give one section or option, such as loss or optim.lr, or none")
        print(describe(argv[0] if argv else ""))
    except ValueError as error:
        print(f"lld.config: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
