"""What the CUDA paths must do, on the pretended device or on a real GPU; tests/test_cuda_paths.py asserts.

    python tests/cuda/checks.py FOLDER [NAME …]      # writes FOLDER/<name>.json for each check, or each quick
      one

A process of its own, because the hooks of the pretended device must be there before torch is imported.
"""

import contextlib
import copy
import json
import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "tests")]

import start

REAL = "LLD_REAL_GPU" in os.environ
FOLDER = Path(sys.argv[1])
hooks = None if REAL else start.load_hooks(FOLDER)

import kvcache
import pretended
import torch
import varlen
from pretended import SIM, CudaTensor

pretended.guard = hooks

import transformers
from conftest import make_lm, make_tokenizer
from test_train import write_config

import lld.engine.decoder
import lld.engine.engine
from lld import config, settings
from lld.engine import graphs
from lld.engine import spans as spans_module
from lld.engine.engine import Engine
from lld.model.load import engine_model

SLOTS, LAYERS = 6, 2
KINDS = {"qwen2": "Qwen2", "llama": "Llama", "qwen3": "Qwen3"}


def device(num_devices: int = 1):
    return contextlib.nullcontext(SIM) if REAL else pretended.pretend(num_devices)


def plain_type(x, *rest):
    """`type` for a module that asks whether weights are plain parameters: a wrapped one would be, on a
    GPU."""
    wrapped = isinstance(x, CudaTensor) and getattr(x, "_is_param", False)
    return torch.nn.Parameter if wrapped and not rest else type(x, *rest)


lld.engine.decoder.type = plain_type


# ---- sampling ----------------------------------------------------------------------------------------------


def make(kind: str, dtype: torch.dtype, vocab_size: int):
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    shape |= {
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
    }
    options = getattr(transformers, f"{KINDS[kind]}Config")(**shape)
    lm = getattr(transformers, f"{KINDS[kind]}ForCausalLM")(options).eval()
    with torch.no_grad():
        lm.lm_head.weight.mul_(8)
    for weight in lm.parameters():
        weight.data = weight.data.to(dtype)
    return lm


def play(lm, tokenizer, **options):
    """Two turns of six rows: per row and turn its tokens and log-probabilities."""
    sampling = {"temperature": 1.0, "top_p": 1.0} | options
    engine = Engine(lm, tokenizer, num_slots=SLOTS, stop_strings=("</search>",), eos_ids=(1,), **sampling)
    for key in range(2):
        engine.add(key, [20 + key] * (10 + 7 * key), [10 * key + i for i in range(3)], 10)
    turns = {}
    while engine.busy:
        for stopped in engine.step():
            turns.setdefault(str(stopped.key), []).append((stopped.token_ids, stopped.logprobs))
            if len(turns[str(stopped.key)]) == 1:
                engine.extend(stopped.key, [30] * 9, 10)
            else:
                engine.release(stopped.key)
    return turns


def compare(left: dict, right: dict) -> dict:
    """Share of turns with the same tokens, and the largest difference of log-probabilities in those."""
    pairs = [pair for key in sorted(left) for pair in zip(left[key], right[key], strict=True)]
    same = [(a, b) for (x, a), (y, b) in pairs if x == y]
    gaps = [abs(p - q) for a, b in same for p, q in zip(a, b, strict=True)]
    return {"same": len(same), "turns": len(pairs), "gap": max(gaps, default=0.0)}


def seen() -> dict:
    return {
        name: {str(k): v for k, v in getattr(SIM, name).items()}
        for name in ("waits", "copies", "launches", "sdpa", "varlen", "graphs")
    }


def sampling() -> dict:
    """Tokens of each kind of model on the device, eager and by graphs, beside those of the CPU (float32) and
    of each other (bf16)."""
    tokenizer, found = make_tokenizer(), {}
    graphs.REPEATS = 3
    for kind, dtype in (
        ("qwen2", torch.float32),
        ("llama", torch.float32),
        ("qwen3", torch.float32),
        ("qwen2", torch.bfloat16),
    ):
        lm = make(kind, dtype, len(tokenizer))
        expected = play(lm, tokenizer)
        with device():
            on_device = copy.deepcopy(lm).to("cuda")
            joined = engine_model(lm, torch.device("cuda"), bf16=dtype == torch.bfloat16)
            name = f"{kind} {str(dtype)[6:]}"
            cases = [("eager", joined, {}), ("graphs", joined, {"cuda_graphs": True, "max_tokens": 300})]
            for how, lm_there, options in [*cases, ("apart", on_device, {})]:
                SIM.reset()
                turns = play(lm_there, tokenizer, **options)
                found[f"{name} {how}"] = compare(expected, turns) | {"seen": seen()}
                if dtype == torch.bfloat16:  # the CPU's bf16 kernels round otherwise: eager is the measure
                    expected = turns
                found[f"{name} {how}"]["buffers"] = sorted({str(b.dtype) for b in lm_there.buffers()})
            if kind == "llama":
                found["top-p"] = compare(
                    play(lm, tokenizer, top_p=0.9), play(on_device, tokenizer, top_p=0.9)
                )
                found["greedy"] = compare(
                    play(lm, tokenizer, temperature=0), play(on_device, tokenizer, temperature=0)
                )
    return found


def with_flash_attn():
    """The package where there is one, else its stand-in."""
    if spans_module.flash_attn_with_kvcache is None:
        spans_module.flash_attn_with_kvcache = kvcache.flash_attn_with_kvcache


def flash_attn() -> dict:
    """With flash-attn: tokens of graphs beside those of eager steps in bf16, and what eager steps wait
    for."""
    tokenizer, found = make_tokenizer(), {}
    graphs.REPEATS = 3
    lm = make("qwen2", torch.bfloat16, len(tokenizer))
    before = spans_module.flash_attn_with_kvcache
    with device():
        lm = engine_model(lm, torch.device("cuda"), bf16=True)
        with_flash_attn()
        SIM.reset()
        expected = play(lm, tokenizer)
        found["eager"] = {"seen": seen()}
        SIM.reset()
        found["graphs"] = compare(expected, play(lm, tokenizer, cuda_graphs=True, max_tokens=300)) | {
            "seen": seen()
        }
    spans_module.flash_attn_with_kvcache = before
    return found


def decoding() -> dict:
    """The benchmark of decode steps in each of its modes, in a tiny shape."""
    sys.path.insert(0, str(ROOT / "tests" / "bench"))
    import rollout_gpu

    graphs.REPEATS, found = 3, {}
    if not REAL:
        rollout_gpu.BYTES, rollout_gpu.SIDE = 1 << 16, 64
    before = spans_module.flash_attn_with_kvcache
    with device():
        with_flash_attn()
        for mode in rollout_gpu.MODES:
            SIM.reset()
            found[mode] = rollout_gpu.measure_decode("tiny", 3, mode, context=20, steps=2) | {"seen": seen()}
    spans_module.flash_attn_with_kvcache = before
    return found


def attending() -> dict:
    """The largest error of the engine's attention beside plain sums: rows with one new token, and with
    several.
    """
    counts, ends, found = [1, 1, 5, 3], [300, 7, 140, 3], {}
    before = spans_module.flash_attn_with_kvcache
    torch.manual_seed(0)
    shapes = (sum(counts), 4, 16), (len(counts), 512, 2, 16), (len(counts), 512, 2, 16)
    for name, dtype in (
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("flash-attn", torch.bfloat16),
    ):
        query, keys, values = (torch.randn(shape).to(dtype) for shape in shapes)
        rows = zip(query.float().split(counts), keys.float(), values.float(), ends, strict=True)
        expected = torch.cat([varlen.attend(q, k[:end], v[:end], True, None)[0] for q, k, v, end in rows])
        with device():
            spans_module.flash_attn_with_kvcache = before
            if name == "flash-attn":
                with_flash_attn()
            told = [torch.tensor(numbers, device="cuda") for numbers in (ends, counts)]
            SIM.reset()
            spans = spans_module.Spans(ends, counts, *told, dtype)
            attended = spans.attend(*(x.to("cuda") for x in (query, keys, values)), None)
            found[name] = {"seen": seen(), "error": float((attended.float().cpu() - expected).abs().max())}
    spans_module.flash_attn_with_kvcache = before
    return found


def steps() -> dict:
    """Waits, launches and shapes of 12 eager decode steps and of a prefill, with LAYERS and twice as many
    layers, in bf16; and of a whole rollout."""
    tokenizer, found = make_tokenizer(), {}
    options = {"num_slots": 4, "temperature": 1.0, "stop_strings": (), "eos_ids": (), "max_tokens": 100}
    for layers in (LAYERS, 2 * LAYERS):
        lm = make_lm(tokenizer, num_layers=layers, vocab_size=2000)
        with device():
            lm = engine_model(lm, torch.device("cuda"), bf16=True)
            cases = (("decode", 1.0, False), ("top-p", 0.3, False), ("autocast", 1.0, True))
            for name, top_p, cast in cases:
                with torch.autocast("cuda", torch.bfloat16, enabled=cast):
                    engine = Engine(lm, tokenizer, top_p=top_p, **options)
                    cache = engine.cache.keys_values
                    for key in range(4):
                        engine.add(key, [20 + key] * (10 + key), [key], 40)
                    SIM.reset()
                    engine.step()
                    found[f"prefill {layers}"] = seen()
                    engine.step()
                    SIM.reset()
                    for _ in range(12):
                        engine.step()
                    stays = {"shapes": len(SIM.shapes), "cache stays": engine.cache.keys_values is cache}
                    found[f"{name} {layers}"] = seen() | stays
    with device():
        SIM.reset()
        play(lm, tokenizer, max_tokens=100)
    found["rollout"] = seen() | {"shapes": len(SIM.shapes)}
    return found


class HostTensors:
    """torch for a module that forgot a device."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def arange(self, *args, device=None, **kwargs):
        return torch.arange(*args, **kwargs)


def mutations() -> dict:
    """What the pretended device says of two mistakes: a tensor made on the host, and a question to the device
    in each step."""
    tokenizer, found = make_tokenizer(), {}
    lm, sample = make_lm(tokenizer), lld.engine.engine.sample_tokens

    def asking(logits_SV, *rest):
        assert bool(logits_SV.isfinite().all())
        return sample(logits_SV, *rest)

    with device():
        lm = lm.to("cuda")
        for name, module, attribute, mistake in (
            ("engine", Engine, "_to_device", lambda _self, numbers: torch.tensor(numbers)),
            ("attention", spans_module, "torch", HostTensors()),
            ("asking", lld.engine.engine, "sample_tokens", asking),
        ):
            right = getattr(module, attribute)
            setattr(module, attribute, mistake)
            SIM.reset()
            try:
                play(lm, tokenizer)
                found[name] = seen()
            except (RuntimeError, TypeError) as error:
                found[name] = str(error)
            setattr(module, attribute, right)
    return found


# ---- search, influence -------------------------------------------------------------------------------------


def searching() -> dict:
    """Passages found by the torch backend with an encoder on the device, from the main thread, a pool's, and
    under autocast."""
    from lld.retrieval.backends import open_retriever
    from lld.retrieval.build import build_index

    tokenizer, encoder = make_tokenizer(), FOLDER / "e5-tiny"
    torch.manual_seed(0)
    options = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
    transformers.BertModel(options).save_pretrained(encoder)
    tokenizer.save_pretrained(encoder)
    corpus, index = FOLDER / "numbers.jsonl", FOLDER / "index"
    corpus.write_text(
        "".join(
            json.dumps({"id": str(i), "contents": f'"T{i}"\nabout number {i} and {i * 7 % 13}'}) + "\n"
            for i in range(200)
        )
    )
    queries, found = ["number 3", "about 77", "who"], {}

    def search(retriever):
        return [[passage.id for passage in passages] for passages in retriever.search(queries, 3)]

    def open_one(dtype):
        return open_retriever(
            config.Retriever(
                url=None,
                backend="torch",
                index=str(index),
                corpus=str(corpus),
                encoder=str(encoder),
                dtype=dtype,
            )
        )

    build_index(corpus, index, str(encoder), "flat", 64, batch_size=32, shard_rows=70)
    found["cpu"] = search(open_one("float16"))
    with device():
        for dtype in ("float16", "int8"):
            retriever = open_one(dtype)
            found[dtype] = search(retriever)
            with ThreadPoolExecutor(1) as pool:
                found[f"{dtype}, pool"] = pool.submit(search, retriever).result()
            with torch.autocast("cuda", torch.bfloat16):
                found[f"{dtype}, autocast"] = search(retriever)
    with device(2):  # the vectors are shared out over both
        found["two devices"] = search(open_one("float16"))
    return found


def searching_on_rank_1() -> dict:
    """A search from a pool's thread, which begins with device 0, of a process whose device is the second."""
    from lld.retrieval.encoder import Encoder

    if REAL and torch.cuda.device_count() < 2:
        return {"skipped": "one GPU"}
    with device(2):
        torch.cuda.set_device(1)
        encoder = Encoder(str(FOLDER / "e5-tiny"))
        with ThreadPoolExecutor(1) as pool:
            vectors = pool.submit(encoder.encode, ["number 3"], "query").result()
        torch.cuda.set_device(0)
    return {"shape": list(vectors.shape)}


def influence() -> dict:
    """The largest difference of influences, and of measured changes, between the device and the CPU."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from test_influence import make_group, options

    from lld.influence.analysis import analyse
    from lld.influence.measured import displace_each
    from lld.policy import Policy

    tokenizer, group = make_tokenizer(), make_group()
    lm = make_lm(tokenizer, hidden_size=32, scale=3.0)

    def measure(on_cpu: bool):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=on_cpu, mixed_precision="no")
        policy = accelerator.prepare_model(Policy(copy.deepcopy(lm)))
        exact = Policy(copy.deepcopy(lm).double()).to(accelerator.device)
        matrix = analyse(exact, group, tokenizer, options(), True)["matrix"]
        bars = displace_each(accelerator, policy, [group], options(), "adamw", 1e-4)
        return [
            torch.tensor(x)
            for x in (matrix["total"], matrix["true_head"], matrix["true_model"], bars[0]["delta"])
        ]

    expected = measure(True)
    with device():
        found = measure(False)
    AcceleratorState._reset_state(True)
    return {"gap": max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True))}


# ---- whole programs ----------------------------------------------------------------------------------------


def make_world() -> None:
    """The tiny world of all runs, made on the CPU."""
    from lld.tinyworld.prepare import prepare_world

    cfg = settings.load(small("world"), [])
    prepare_world(cfg.tinyworld, cfg.rollout, cfg.retriever.topk)
    questions = (FOLDER / "world" / "heldout.jsonl").read_text().splitlines(keepends=True)
    (FOLDER / "few.jsonl").write_text("".join(questions[:4]))


def small(name: str, **changes) -> Path:
    """A run of two steps in bf16 with gradient checkpointing, KL, LLDS, re-scoring, sentinel, evaluation and
    checkpoints."""
    few = FOLDER / "few.jsonl"
    standard = {
        "run": {"dir": str(FOLDER / name), "steps": 2, "save_every": 1, "keep_checkpoints": 0},
        "model": {
            "mixed_precision": "bf16",
            "gradient_checkpointing": True,
            "path": str(FOLDER / "world" / "policy"),
        },
        "rollout": {
            "group_size": 2,
            "num_questions": 2,
            "max_new_tokens": 24,
            "num_slots": 3,
            "top_p": 0.9,
            "weights": "int8",
        },
        "optim": {"micro_batch_size": 2},
        "loss": {"lld_lag_steps": 0, "kl_weight": 0.001, "old_logprobs": "trainer", "support": "kept"},
        "monitor": {"trajectories_every": 1, "rescore_every": 1, "sentinel_every": 1},
        "eval": {"every": 1, "at_start": False, "benchmarks": {"tiny": str(few)}},
        "tinyworld": {"num_people": 20, "warm_start_steps": 30},
    }
    for section, options in changes.items():
        standard[section] = standard.get(section, {}) | options
    return write_config(FOLDER, name, **standard)


def train_twice(name: str, **changes) -> dict:
    """Exit codes of a run cut at its first step and of its resumption, what was seen, and the last row
    logged."""
    from accelerate.state import AcceleratorState

    import train
    from lld.running import recording

    AcceleratorState._reset_state(True)
    recording.draw_report = lambda *_: ""
    path, codes = small(name, **changes), []
    SIM.reset()
    with device(int(os.environ.get("LOCAL_WORLD_SIZE", 1))):
        codes.append(train.main(["--config", str(path), "run.steps=1"]))
        codes.append(train.main(["--config", str(path), "--resume"]))
    rows = (FOLDER / name / "metrics.jsonl").read_text().splitlines()
    return {"codes": codes, "seen": seen(), "rows": [json.loads(row) for row in rows]}


def training() -> dict:
    return train_twice("plain")


def evaluating() -> dict:
    """eval.py on a checkpoint of `training`, in bf16: its exit code and the types of the engine's weights and
    buffers."""
    import eval as program
    from lld.evaluation import play

    kinds, open_engine = {}, play.open_engine

    def spy(*args):
        engine = open_engine(*args)
        kinds.update(
            weights=sorted({str(w.dtype) for w in engine.lm.parameters()}),
            buffers=sorted({str(b.dtype) for b in engine.lm.buffers()}),
        )
        return engine

    play.open_engine = spy
    SIM.reset()
    checkpoint = FOLDER / "plain" / "checkpoints" / "step_000002"
    with device():
        arguments = [
            "--ckpt",
            str(checkpoint),
            "--config",
            str(FOLDER / "plain.yaml"),
            "--out",
            str(FOLDER / "evaluated"),
        ]
        code = program.main([*arguments, "eval.top_p=0.9", "eval.temperature=0.7"])
    play.open_engine = open_engine
    return {"code": code, "seen": seen()} | kinds


def offloading() -> dict:
    """bf16 weights, moments in CPU memory, an older anchor, a crash box, deterministic kernels, CUDA graphs;
    then resumed."""
    graphs.REPEATS = 3
    changes = {
        "optim": {"name": "adamw_offload"},
        "loss": {"lld_lag_steps": 1},
        "rollout": {"cuda_graphs": True},
    }
    return train_twice("offload", **changes, monitor={"crash_box": 1}, run={"deterministic": True})


def adapting() -> dict:
    """LoRA over bf16 weights, with the reference and an older anchor in the same model, and CUDA graphs over
    the merged copy."""
    graphs.REPEATS = 3
    changes = {"loss": {"lld_lag_steps": 1}, "rollout": {"cuda_graphs": True, "weights": "trainer"}}
    return train_twice("adapters", model={"lora_rank": 4}, optim={"lr": 1e-2}, **changes)


def sharding() -> dict:
    """FSDP2 in bf16, one of the processes of torchrun: a run, then its resumption, and the weights of both
    ranks."""
    from accelerate import Accelerator

    torch.distributed.init_process_group("cpu:gloo,cuda:gloo")  # NCCL knows no pretended device
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    Accelerator.end_training = lambda *_: None  # the process group serves both runs
    return train_twice("sharded")


def float32() -> dict:
    """Without mixed precision: graphs, moments in CPU memory during rollouts, overlapping searches, sampled
    evaluation."""
    graphs.REPEATS = 3
    rollout = {"cuda_graphs": True, "overlap_search": True}
    sampled = {"top_p": 0.9, "temperature": 1.0}
    return train_twice(
        "float32",
        model={"mixed_precision": "no"},
        rollout=rollout,
        optim={"cpu_in_rollout": True},
        eval=sampled,
    )


QUICK = [
    sampling,
    attending,
    flash_attn,
    decoding,
    steps,
    mutations,
    searching,
    searching_on_rank_1,
    influence,
    training,
    evaluating,
]
WHOLE = [offloading, float32, adapting, sharding]


def main(names: list[str]) -> None:
    """Each check leaves a file of its own, with what it found or with the traceback that ended it."""
    known = {check.__name__: check for check in QUICK + WHOLE}
    if {"training", "offloading", "float32", "adapting"} & set(names):
        make_world()
    for name in names:
        began = time.process_time()
        try:
            found = known[name]()
        except Exception:
            found = {"error": traceback.format_exc()}
        if os.environ.get("RANK", "0") == "0":
            found["cpu_s"] = round(time.process_time() - began, 1)
            (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1))
        print(
            f"{name}: {time.process_time() - began:.1f} s of CPU" + ", FAILED" * ("error" in found),
            file=sys.stderr,
        )


if __name__ == "__main__":
    main(sys.argv[2:] or [check.__name__ for check in QUICK])
