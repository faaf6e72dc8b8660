"""Kept tokens per second of our rollout against hand-written loops over transformers and against TRL, one
policy after another.

    python tests/bench/rollout_speed.py --policy tiny --world FOLDER [--trl PYTHON]
    python tests/bench/rollout_speed.py --policy 0.5b [--trl PYTHON]

Competitors, with the same policy, questions, sampling and search function; kept are the model's tokens up to
the closing tag: (a) Search-R1's loop over `model.generate`: the whole history again each turn, all rows wait
for the slowest, no stop strings, cut afterwards
    (without the log-probabilities that Search-R1 computes each turn and throws away);
(a') the same, stopping at closing tags, which are single tokens in both worlds and given as EOS:
transformers' stop_strings cost more and do not take the tiny world's tokenizer; (b) (a') over
`generate_batch`, paged; (c) TRL's GRPOTrainer._generate with a search tool, EOS as in (a'), its parser of
tool calls replaced by ours. With --search-s every call of the search function waits that long (by the wall,
so not with --cpu), and ours is also played with searches while others decode. PYTHON is an interpreter that
has trl 1.16.0. None of them records log-probabilities; ours does.

tiny: a world folder made by `python train.py --config configs/tiny.yaml` (its trained policy, questions,
corpus and BM25), 16 questions x 5, budgets of configs/tiny.yaml.
0.5b: Qwen2.5-0.5B's shape with random weights, --questions x --samples. A random policy writes no tags, so
  two weight matrices are written by hand:
layers add next to nothing to the residual stream and the LM head (untied for that) leads from each token to
  its successor, so that turns are
words counted down to a closing tag from a drawn start. Every matrix product is the real one. Lengths are
  Search-R1's budgets (500 a turn, 500 an observation) and
a prompt of 150, divided by --scale; a turn has 43 to 162 tokens, divided likewise (+3), a search follows a
  passage half of the time.

The bound is what any method must push: each prompt once and every observation at the cost of a token in a
large prefill, every kept token at that of a decode step with all rows in it (or, below it, at that of a
prefill and the LM head). Threads: OMP_NUM_THREADS.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from lld import protocol
from lld.data import load_questions
from lld.engine.engine import Engine
from lld.episode import Question
from lld.model import attention
from lld.protocol import Passage
from lld.rollout import Budgets, rollout
from lld.tools import TOOLS

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ m['content'] }}{% else %}<|im_start|>{{ "
    "m['role'] }}\n{{ (m['content'] or '').split('Question: ')[-1].strip() }}{{ m['tool_calls'] if "
    "m['tool_calls'] }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt and "
    "messages[-1]['role'] != 'tool' %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class World:
    lm: torch.nn.Module
    tokenizer: object
    questions: list[Question]
    search: Callable
    num_samples: int
    budgets: dict
    stop_ids: list[int]  # EOS and the closing tags, which are single tokens in both worlds

    def prompts(self) -> list[list[int]]:
        return [protocol.encode_prompt(self.tokenizer, question.text) for question in self.questions]

    def cut(self, token_ids: list[int]) -> tuple[list[int], protocol.Action]:
        """A turn up to its first closing tag or EOS, and its action."""
        ends = [i for i, token in enumerate(token_ids) if token in self.stop_ids]
        kept = token_ids[: ends[0] + 1] if ends else token_ids
        return kept, protocol.parse_action(self.tokenizer.decode(kept, skip_special_tokens=False))

    def reply(self, action: protocol.Action, passages: list[Passage]) -> list[int]:
        if action.kind == "invalid":
            return self.tokenizer.encode(protocol.INVALID_ACTION, add_special_tokens=False)
        return protocol.render_observation(self.tokenizer, passages, self.budgets["max_observation_tokens"])[
            0
        ]


def tiny_world(folder: Path) -> World:
    from lld.config import Retriever
    from lld.retrieval.client import make_search

    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    lm = LlamaForCausalLM.from_pretrained(
        folder / "policy", dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    search = make_search(Retriever(url=None, corpus=str(folder / "corpus.jsonl"), backend="bm25"))
    questions = load_questions(str(folder / "train.jsonl"))[:16]
    return World(
        lm,
        tokenizer,
        questions,
        search,
        5,
        dict(max_turns=3, max_new_tokens=48, max_observation_tokens=80, max_episode_tokens=320),
        stop_ids_of(tokenizer),
    )


def stop_ids_of(tokenizer) -> list[int]:
    return [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(protocol.STOP_STRINGS))]


def shaped_tokenizer(num_words: int):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special, tags = (
        ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<unk>"],
        [f"<{slash}{name}>" for name in ("think", "search", "answer", "information") for slash in ("", "/")],
    )
    words = (
        special
        + tags
        + ["user", "assistant", "topic", "gold", "noise", "noise2"]
        + [f"{kind}{i}" for kind in ("s", "a") for i in range(num_words)]
        + [f"word{i}" for i in range(100)]
    )
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(
        __import__("tokenizers").Regex(r"\w+|[^\w\s]"), "removed", invert=True
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.add_tokens(tags)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def half_billion_world(
    scale: int = 4, num_questions: int = 2, num_samples: int = 4, num_layers: int = 24
) -> World:
    """A Qwen2.5-0.5B whose next token is a function of the last one; `s` words count down to a search, `a`
    words to an answer."""
    num_words = 160 // scale
    tokenizer = shaped_tokenizer(num_words)
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=num_layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    lm = Qwen2ForCausalLM(config).eval()
    lm.set_attn_implementation("sdpa")

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False)

    after: dict[int, list[int]] = {}  # token -> tokens that lead to it

    def lead(source, target):
        return after.setdefault(ids(target)[0], []).append(ids(source)[0])

    for kind, tag, word in (("s", "search", "topic"), ("a", "answer", "gold")):
        for i in range(num_words - 1):
            lead(f"{kind}{i + 1}", f"{kind}{i}")
        for i in range(num_words // 4, num_words):
            lead("</information>", f"{kind}{i}")
            lead("assistant", f"{kind}{i}") if kind == "s" else None
        for path in (
            (f"{kind}0", f"<{tag}>"),
            (f"<{tag}>", word),
            (word, f"</{tag}>"),
            (f"</{tag}>", "noise"),
        ):
            lead(*path)
    lead("noise", "noise2"), lead("noise2", "noise")
    with torch.no_grad():
        for layer in lm.model.layers:
            layer.self_attn.o_proj.weight.mul_(1e-3), layer.mlp.down_proj.weight.mul_(1e-3)
        embed_VC = lm.model.embed_tokens.weight.normal_()
        for target, sources in after.items():
            lm.lm_head.weight[target] = embed_VC[sources].sum(0) * (60 / config.hidden_size)
    words = " ".join(f"word{i}" for i in range(128 // scale))

    def search(queries):
        return [[Passage(str(r), f'"word{r}"\n{words}') for r in range(3)] for _ in queries]

    questions = [
        Question(f"q/{i}", f"word{i} " + " ".join(words.split()[: 120 // scale]), ("gold",), "q")
        for i in range(num_questions)
    ]
    return World(
        lm,
        tokenizer,
        questions,
        search,
        num_samples,
        dict(
            max_turns=3,
            max_new_tokens=500 // scale,
            max_observation_tokens=500 // scale,
            max_episode_tokens=4096 // scale,
        ),
        stop_ids_of(tokenizer),
    )


def ours(world: World, num_slots: int | None = None, overlap: bool = False) -> int:
    num_slots = num_slots or len(world.questions) * world.num_samples
    engine = world.engine = Engine(
        world.lm,
        world.tokenizer,
        num_slots=num_slots,
        temperature=1.0,
        top_p=1.0,
        stop_strings=protocol.STOP_STRINGS,
        eos_ids=(world.tokenizer.eos_token_id,),
    )
    world.episodes = rollout(
        engine,
        world.tokenizer,
        world.questions,
        world.search,
        Budgets(**world.budgets),
        num_samples=world.num_samples,
        seed=0,
        step=0,
        overlap_search=overlap,
    )
    return sum(episode.num_model_tokens for episode in world.episodes)


def loop(world: World, generate: Callable[[list[list[int]]], list[list[int]]]) -> int:
    """Search-R1's `run_llm_loop`: all that still speak say a turn, are cut, searched for together and go
    on."""
    contexts = [list(prompt) for prompt in world.prompts() for _ in range(world.num_samples)]
    active, num_kept = list(range(len(contexts))), 0
    for turn in range(world.budgets["max_turns"] + 1):
        spoken = [world.cut(token_ids) for token_ids in generate([contexts[i] for i in active])]
        num_kept += sum(len(kept) for kept, _ in spoken)
        going = [
            (i, kept, action)
            for i, (kept, action) in zip(active, spoken, strict=True)
            if action.kind != "answer"
        ]
        if not going or turn == world.budgets["max_turns"]:
            return num_kept
        queries = [action.content for _, _, action in going if action.kind == "search"]
        found = iter(world.search(queries) if queries else [])
        active = []
        for i, kept, action in going:
            reply = world.reply(action, next(found) if action.kind == "search" else [])
            if len(contexts[i]) + len(kept) + len(reply) < world.budgets["max_episode_tokens"]:
                contexts[i] += kept + reply
                active.append(i)


def generate_padded(world: World, stop_ids: list[int]) -> Callable:
    def generate(contexts: list[list[int]]) -> list[list[int]]:
        width = max(map(len, contexts))
        ids_BT = torch.tensor([[world.tokenizer.pad_token_id] * (width - len(c)) + c for c in contexts])
        mask_BT = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts])
        sampling = dict(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=world.budgets["max_new_tokens"],
            pad_token_id=world.tokenizer.pad_token_id,
        )
        return world.lm.generate(ids_BT, attention_mask=mask_BT, eos_token_id=stop_ids, **sampling)[
            :, width:
        ].tolist()

    return generate


def search_r1(world: World) -> int:
    return loop(world, generate_padded(world, [world.tokenizer.eos_token_id]))


def search_r1_with_stops(world: World) -> int:
    return loop(world, generate_padded(world, world.stop_ids))


def continuous_batching(world: World) -> int:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    # Sized to what is played: by default it takes all memory for pages, and writing the mask over them takes
    # minutes a step.
    rows = len(world.questions) * world.num_samples
    blocks = rows * -(-world.budgets["max_episode_tokens"] // 32)
    settings = ContinuousBatchingConfig(
        block_size=32, num_blocks=blocks, max_batch_tokens=1024, use_cuda_graph=False
    )
    sampling = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=world.budgets["max_new_tokens"],
        eos_token_id=world.stop_ids,
        pad_token_id=world.tokenizer.pad_token_id,
    )

    def generate(contexts: list[list[int]]) -> list[list[int]]:
        results = world.lm.generate_batch(
            contexts, generation_config=sampling, continuous_batching_config=settings, persistent_manager=True
        )
        assert len(results) == len(contexts) and not any(result.error for result in results.values())
        return [result.generated_tokens for result in results.values()]

    kept = loop(world, generate)
    world.lm.destroy_cached_continuous_batching_manager()
    return kept


def trl_rollouts(world: World) -> Callable[[World], int]:
    """A function that plays one rollout by TRL's GRPOTrainer; building the trainer is not timed."""
    import tempfile

    import trl.trainer.grpo_trainer as module
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def parse(tokenizer, ids, **_):
        action = protocol.parse_action(tokenizer.decode(ids, skip_special_tokens=False))
        calls = (
            [{"type": "function", "function": {"name": "search", "arguments": {"query": action.content}}}]
            if action.kind == "search"
            else None
        )
        return {"role": "assistant", "content": "said"} | ({"tool_calls": calls} if calls else {})

    def search(query: str) -> str:
        """Searches.

        Args:
            query: the query

        Returns:
            the passages
        """
        passages = world.search([query])[0]
        return (
            protocol.OBSERVATION_HEAD
            + "".join(
                protocol.defuse(TOOLS["search"].render(passage, rank))
                for rank, passage in enumerate(passages, 1)
            ).strip()
            + protocol.OBSERVATION_TAIL
        )

    module.parse_response = parse
    world.tokenizer.chat_template, world.tokenizer.response_template = TEMPLATE, {"fields": {}}
    world.tokenizer.padding_side = "left"
    world.lm.generation_config.eos_token_id = world.stop_ids
    messages = [
        [{"role": "user", "content": protocol.question_prompt(question.text)}] for question in world.questions
    ]
    options = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=len(messages) * world.num_samples,
        num_generations=world.num_samples,
        max_completion_length=world.budgets["max_episode_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        use_cpu=True,
        bf16=False,
        report_to=[],
        beta=0.0,
        max_tool_calling_iterations=world.budgets["max_turns"],
        generation_kwargs={"max_new_tokens": world.budgets["max_new_tokens"]},
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model=world.lm,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=options,
        train_dataset=Dataset.from_dict({"prompt": messages}),
        processing_class=world.tokenizer,
        tools=[search],
    )
    repeated = [message for message in messages for _ in range(world.num_samples)]
    trainer.model.eval()
    trainer.num_generations_eval = world.num_samples

    def play(world: World) -> int:
        trainer._sync_tool_dicts, trainer._async_tool_dicts = (
            [{"search": search}] * len(repeated),
            [{}] * len(repeated),
        )
        played = trainer._generate(repeated)
        masks = next(
            part
            for part in played
            if isinstance(part, list) and part and isinstance(part[0], list) and set(part[0]) <= {0, 1}
        )
        return sum(map(sum, masks))

    return play


def clock() -> float:
    """Seconds: of the wall, or with --cpu of this process's processors, which others on the machine disturb
    less."""
    return time.process_time() if "--cpu" in sys.argv else time.perf_counter()


def timed(play: Callable[[World], int], world: World, repeats: int) -> tuple[float, float]:
    """Kept tokens and seconds of `repeats` rollouts."""
    torch.manual_seed(0)
    began, kept = clock(), 0
    for _ in range(repeats):
        kept += play(world)
    return kept, clock() - began


@torch.no_grad()
def costs(world: World) -> tuple[float, float, float]:
    """Seconds a token: in a prefill of 8 rows of 128 without and with the LM head, and in a decode step of
    all rows at 128 tokens of context, head included."""
    lm, rows = world.lm, len(world.questions) * world.num_samples

    def best(call):
        return min(_seconds(call) for _ in range(5 if lm.config.num_hidden_layers < 8 else 2))

    ids_RN = torch.randint(5, 200, (8, 128))
    prefill, hidden_NC = (
        best(lambda: lm.base_model(ids_RN, use_cache=True)) / ids_RN.numel(),
        torch.randn(rows, lm.config.hidden_size),
    )
    cache = lm.base_model(torch.randint(5, 200, (rows, 128)), use_cache=True).past_key_values
    last_R1 = torch.randint(5, 200, (rows, 1))

    def decode():
        lm(last_R1, past_key_values=cache, use_cache=True)
        cache.crop(128)

    return prefill, prefill + best(lambda: lm.lm_head(hidden_NC)) / rows, best(decode) / rows


def _seconds(call) -> float:
    began = clock()
    call()
    return clock() - began


COMPETITORS = {
    "ours": ours,
    "(a) Search-R1's loop over generate": search_r1,
    "(a') the same with stop strings": search_r1_with_stops,
    "(b) the same over generate_batch": continuous_batching,
}
TRL = "(c) TRL 1.16.0 GRPOTrainer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", choices=("tiny", "0.5b"), required=True)
    parser.add_argument("--world", type=Path, help="folder of a tiny world")
    parser.add_argument("--trl", help="a Python that has trl")
    parser.add_argument("--repeats", type=int, default=1, help="rollouts of each competitor")
    parser.add_argument("--scale", type=int, default=4, help="0.5b: Search-R1's lengths divided by this")
    parser.add_argument("--questions", type=int, default=2, help="0.5b")
    parser.add_argument("--samples", type=int, default=4, help="0.5b: episodes a question")
    parser.add_argument("--only", help="comma-separated parts of competitors' names")
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="processor seconds instead of the wall's; meant for OMP_NUM_THREADS=1",
    )
    parser.add_argument(
        "--search-s",
        type=float,
        default=0.0,
        help="seconds that a call of the search function waits, as for a server; adds ours with "
        "rollout.overlap_search",
    )
    parser.add_argument("--inside-trl", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    world = (
        tiny_world(args.world)
        if args.policy == "tiny"
        else half_billion_world(args.scale, args.questions, args.samples)
    )
    if args.search_s:
        found = world.search
        world.search = lambda queries: (time.sleep(args.search_s), found(queries))[1]
    if args.inside_trl:
        play = trl_rollouts(world)
        if args.policy == "tiny":
            play(world)
        print(json.dumps(timed(play, world, args.repeats)))
        return
    competitors = COMPETITORS | (
        {"ours, searches overlapped": lambda world: ours(world, overlap=True)} if args.search_s else {}
    )
    chosen = {
        name: play
        for name, play in competitors.items()
        if not args.only or any(part in name for part in args.only.split(","))
    }
    prefill, read, decode = costs(world)
    rows = {}
    for name, play in chosen.items():
        world.lm.set_attn_implementation(attention.NAME if name.startswith("ours") else "sdpa")
        if args.policy == "tiny":
            play(world)  # the first call compiles and allocates; in the big world that is lost in the rest
        rows[name] = timed(play, world, args.repeats)
        print(name, rows[name], file=sys.stderr, flush=True)
    if args.trl:
        command = (
            [
                args.trl,
                __file__,
                "--policy",
                args.policy,
                "--repeats",
                str(args.repeats),
                "--scale",
                str(args.scale),
                "--questions",
                str(args.questions),
                "--samples",
                str(args.samples),
                "--search-s",
                str(args.search_s),
                "--inside-trl",
            ]
            + ["--cpu"] * args.cpu
            + (["--world", str(args.world)] if args.world else [])
        )
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        rows[TRL] = tuple(json.loads(done.stdout.strip().splitlines()[-1]))
    kept, seconds = rows["ours"]
    pushed = sum(map(len, world.prompts())) + sum(
        len(e.token_ids) - e.num_model_tokens for e in world.episodes
    )
    sampled = sum(e.num_model_tokens for e in world.episodes)
    print(
        f"\n{args.policy}: {len(world.episodes)} episodes, {sum(len(e.turns) for e in world.episodes)} "
        f"turns, {sampled} kept tokens, {pushed} of prompts and observations; {torch.get_num_threads()} "
        f"threads, {'processor' if args.cpu else 'wall'} seconds; ",
        end="",
    )
    print(
        f"a token costs {prefill * 1e3:.3f} ms in a prefill, {read * 1e3:.3f} with the LM head, "
        f"{decode * 1e3:.3f} in a decode step of all rows\n"
    )
    print("| rollout | kept tokens | seconds | kept tokens/s | ours is faster by |\n|---|---|---|---|---|")
    for name, (num, took) in rows.items():
        print(f"| {name} | {num} | {took:.2f} | {num / took:.1f} | {(kept / seconds) / (num / took):.2f} |")
    for name, bound in (
        ("bound: prefill, then decode steps of all rows", pushed * prefill + sampled * decode),
        ("bound: all at the price of a prefill", pushed * prefill + sampled * read),
    ):
        print(
            f"| {name} | {sampled} | {bound:.2f} | {sampled / bound:.1f} | "
            f"{(kept / seconds) / (sampled / bound):.2f} |"
        )


if __name__ == "__main__":
    main()
