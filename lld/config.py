"""Options: declare (frozen dataclasses), load YAML plus `section.key=value`, validate, save.

The defaults are the paper's Qwen2.5-3B run (arXiv 2512.04220v2, B.2.1), so a YAML states only departures from
it.
"""

from dataclasses import dataclass, field
from typing import Literal

BENCHMARKS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wiki", "musique", "bamboogle")


@dataclass(frozen=True)
class Run:
    dir: str = "runs/3b"  # everything a run writes
    seed: int = 0
    steps: int = 1005  # rollout steps; each makes `optim.updates_per_rollout` optimizer steps
    save_every: int = 50  # steps between checkpoints
    keep_checkpoints: int = 3  # newest ones kept, and the best on held-out questions; 0 keeps all
    # Seconds without a sign of life (a phase begun, an episode finished) after which a process ends itself; 0
    # never
    watchdog_s: float = 1800.0
    trackers: tuple[str, ...] = ()  # "tensorboard", "wandb", … through accelerate
    # Ask for deterministic kernels (slower on a GPU), and warn where there is none
    deterministic: bool = False


@dataclass(frozen=True)
class Model:
    path: str = "Qwen/Qwen2.5-3B"  # hub name or folder
    mixed_precision: Literal["no", "bf16"] = "bf16"  # of the computations on a GPU; weights are float32
    gradient_checkpointing: bool = True
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Data:
    train: str = "PeterJinGo/nq_hotpotqa_train"  # hub name, parquet (Search-R1) or jsonl (FlashRAG)
    train_split: str = "train"
    train_sources: tuple[str, ...] = ()  # keep only these `data_source`s; empty keeps all


@dataclass(frozen=True)
class Rollout:
    num_questions: int = 512  # questions a step, over all processes
    group_size: int = 5  # episodes a question
    max_turns: int = 3  # turns that may search; one last turn without search follows
    max_prompt_tokens: int = 2048
    max_new_tokens: int = 500  # a turn
    max_observation_tokens: int = 500
    max_episode_tokens: int = 4096  # prompt, actions and observations together
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    # Sequences decoded together, on each process; `train.py --plan` says what their cache takes
    num_slots: int = 128
    # Share of a step's groups that may be dropped because a search failed; beyond it the run stops
    max_failed_groups: float = 0.1
    # Replay decode steps as CUDA graphs, captured anew in every rollout; nothing on a CPU; run on a pretended
    # GPU only
    cuda_graphs: bool = False
    # Decode on while searches run; False makes the schedule, and so the last bits, repeatable
    overlap_search: bool = True


@dataclass(frozen=True)
class Reward:
    kind: Literal["em", "f1", "cover_em", "format"] = "em"
    structure_format_score: float = 0.2  # Search-R1 v0.3; read by kind "format"
    final_format_score: float = 0.1
    retrieval_score: float = 0.0


@dataclass(frozen=True)
class Advantage:
    normalize_std: bool = True


@dataclass(frozen=True)
class Loss:
    kind: Literal["grpo", "gspo"] = "grpo"
    aggregation: Literal["sequence_mean", "token_mean"] = "sequence_mean"  # Eq. 1 | official code
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_weight: float = 0.001
    entropy_weight: float = 0.0  # official code: 0.001
    # Whose log pi_old the ratio divides by; LLDS and the recorder compare the trainer's in any case.
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    lld_weight: float = 0.2  # lambda; 0 is plain GRPO
    lld_gate: Literal["token", "response", "action"] = "action"
    lld_preserve: Literal["nonnegative", "positive"] = "nonnegative"
    # Nats a token a likelihood may fall by before LLDS acts; bf16 alone moves it by .001
    lld_tolerance: float = 0.0
    lld_normalizer: Literal["preserved", "all"] = "preserved"  # paper | official code
    # Of beta, the weight on answer tokens
    lld_answer_schedule: Literal["constant", "paper", "code"] = "constant"
    lld_answer_weight: float = 1.0  # beta if constant; slope (lambda_answer / lambda) of "code"
    lld_answer_searches: float = 2.0  # V_B of "paper": beta = min(V / V_B, 1)
    # LLDS compares with the policy of this many rollout steps ago; 0 is this rollout's
    lld_lag_steps: int = 0


@dataclass(frozen=True)
class Optim:
    # Moments in float32 | in 8 bits (bitsandbytes) | in CPU memory, as are the float32 weights then
    name: Literal["adamw", "adamw_8bit", "adamw_offload"] = "adamw"
    lr: float = 1e-6
    warmup_steps: int = 286  # rollout steps of linear warm-up
    updates_per_rollout: int = 10
    micro_batch_size: int = 16  # rows in one forward pass on one process; changes memory, never the gradient
    # Tokens (prompts and observations included) in one forward pass, in place of micro_batch_size; null:
    # count rows
    micro_batch_tokens: int | None = None
    betas: tuple[float, ...] = (0.9, 0.999)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    cpu_in_rollout: bool = False  # the optimizer's moments wait in CPU memory while episodes are played


@dataclass(frozen=True)
class Retriever:
    url: str | None = "http://127.0.0.1:8000"  # null searches in this process
    # Further servers of the same index; they share the work and stand in for each other
    replicas: tuple[str, ...] = ()
    timeout_s: float = 30.0  # of one attempt
    deadline_s: float = 120.0  # of a search with all its attempts
    retries: int = 3
    topk: int = 3
    # A query that finds nothing drops its question's group | shows an empty block, as Search-R1 does;
    # evaluation always shows it
    empty_results: Literal["drop", "show"] = "drop"
    record: str | None = None  # file that keeps every query and its passages
    replay: str | None = None  # such a file, which then answers instead of a server or an index
    # What follows is read by retriever_server.py, and in this process where url is null.
    index: str | None = None  # folder made by `python -m lld.retrieval build`, or a FAISS file
    corpus: str | None = None  # jsonl of {"id", "contents"}
    encoder: str = "intfloat/e5-base-v2"
    # Null: what the index folder was built for; faiss for a file
    backend: Literal["faiss", "torch", "bm25", "random", "empty", "oracle"] | None = None
    dtype: Literal["float16", "int8"] = "float16"  # of backend torch
    faiss_params: str = ""  # FAISS's search parameters, such as "nprobe=64"; empty keeps the index's own
    rerank: int = 0  # candidates of a FAISS index to score again with the vectors on disk
    oracle_questions: str | None = None  # jsonl or parquet of questions whose answers backend oracle finds
    device: Literal["auto", "cpu"] = "auto"  # auto: all GPUs, if there are any
    max_memory_gb: float | None = None  # refuse what needs more; null: what is free


@dataclass(frozen=True)
class Eval:
    every: int = 50  # steps between evaluations while training; 0 never
    at_start: bool = True
    benchmarks: dict[str, str] = field(
        default_factory=lambda: {
            name: f"RUC-NLPIR/FlashRAG_datasets/{'2wikimultihopqa' if name == '2wiki' else name}"
            for name in BENCHMARKS
        }
    )
    during_training: tuple[str, ...] = ("nq", "hotpotqa")
    max_questions: int = 500  # of each set while training; eval.py takes all rows
    # The paper's evaluation budget; four full ones do not fit rollout.max_episode_tokens 4096
    max_turns: int = 4
    temperature: float = 0.0
    top_p: float = 1.0
    batch_size: int = 256  # questions between two writes of eval.py


@dataclass(frozen=True)
class Monitor:
    # Steps between re-scorings of a rollout after its last update (the paper's Def. 4.1); 0 never
    rescore_every: int = 5
    sentinel_every: int = 10  # steps between re-scorings of correct episodes kept from the start; 0 never
    sentinel_size: int = 64
    trajectories_every: int = 10  # steps between logs of whole groups, token by token; 0 never
    trajectories_questions: int = 4  # groups in such a log
    # Stop with a checkpoint when decay (2), acceleration (3) or collapse (4), or a later one, begins; 0 never
    stop_in_phase: Literal[0, 2, 3, 4] = 0
    # Rollouts kept for a crash box, written when decay, acceleration or collapse begins; 0 none
    crash_box: int = 0


@dataclass(frozen=True)
class Plan:
    """What `train.py --plan` assumes; a run reads none of it."""

    gpus: int | None = None  # processes, one on each GPU; null: as many as the launcher started
    gpu_memory_gb: float | None = None  # of one GPU, 10^9 bytes; null: what the one here has
    # Whether weights, gradients and optimizer are spread over the GPUs; launcher: as accelerate is configured
    shard: Literal["launcher", "fsdp", "none"] = "launcher"
    prompt_tokens: int = 200  # of an episode
    written_tokens: int = 300  # by the model, in an episode
    observation_tokens: int = 1000  # read from searches, in an episode
    tflops: float = 989.0  # of a GPU in bf16; an H100's
    bandwidth_gb_s: float = 3350.0  # of a GPU's memory; an H100's
    link_gb_s: float = 400.0  # between GPUs, each way
    host_gb_s: float = 25.0  # between a GPU and CPU memory
    cpu_gb_s: float = 100.0  # of CPU memory
    efficiency: float = 0.4  # share of tflops and bandwidth that is reached


@dataclass(frozen=True)
class TinyWorld:
    """A made-up world written to `dir` before training starts; null `dir` means real input."""

    dir: str | None = None
    seed: int = 0
    num_people: int = 160
    namesake_share: float = 0.1  # people who share a name with another: irreducible ambiguity
    two_hop_share: float = 0.6
    warm_start_steps: int = 600
    num_layers: int = 2
    hidden_size: int = 128


@dataclass(frozen=True)
class Config:
    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    advantage: Advantage = Advantage()
    loss: Loss = Loss()
    optim: Optim = Optim()
    retriever: Retriever = Retriever()
    eval: Eval = field(default_factory=Eval)
    monitor: Monitor = Monitor()
    plan: Plan = Plan()
    tinyworld: TinyWorld = TinyWorld()
