"""Seconds and peak memory of an update step: ours, the full-logits form, TRL's GRPO loss and Liger's fused
one.

    python tests/bench/update_speed.py --trl-python VENV/bin/python [--only
    main,vocabulary,length,batch,search] [--threads 2]

VENV has TRL 1.16.0, Liger 0.8.5 and this project's torch and transformers: `python -m venv VENV`, then
`VENV/bin/pip install -r requirements.txt trl==1.16.0 liger-kernel==0.8.5`. Every form trains the same random
Qwen2 (tied embeddings, gradient checkpointing as in the recipes, float32) on the same rows with the same
surrogate (Eq. 1), no KL term, clipping and fused AdamW, in a process of its own, and must find the same
gradient norm. "full" is our update with the logits of all scored tokens in memory: log_softmax, gather, and
the entropy without gradient. "TRL" is GRPOTrainer's own compute_loss (its chunked head; TRL 1.16 has no
full-logits form); "Liger" its LigerFusedLinearGRPOLoss on the last hidden states, without torch.compile,
which needs a C++ compiler.

Seconds: processor time of all threads, the least of `--steps` steps; wall time beside it (on a busy machine
processor time is the fairer one). Memory: the process's highest resident set (ru_maxrss) less its resident
set before the step, when weights and optimizer moments are there: gradients, activations and temporaries. It
is taken twice, each time in a process of its own: as it comes ("resident", with what glibc keeps of blocks
already freed), and with glibc made to return every large block (MALLOC_MMAP_THRESHOLD_, "in use"; slower, so
its seconds do not count). The bound is 6 flop a weight and token (8 below the head: checkpointing) and the
attention's, at the rate of a large matrix product measured in the same process; a head that is computed again
in the backward pass needs a third more of its part, so ours cannot reach it.
"""

import argparse
import ctypes
import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from lld import settings as settings_module

# Group: (vocabulary, width, layers, rows, tokens scored in a row, prompt tokens, share of the tokens after
# the prompt that the model wrote)
CASES = {
    "main": [(151_936, 896, 4, 4, 512, 1, 1.0)],
    "vocabulary": [(v, 256, 2, 4, 512, 1, 1.0) for v in (8_192, 32_768, 151_936)],
    "length": [(151_936, 256, 2, 1, t, 1, 1.0) for t in (512, 2_048, 4_096)],
    "batch": [(151_936, 256, 2, b, 512, 1, 1.0) for b in (1, 8)],
    # The lengths of Search-R1's runs: a third is the model's, the rest passages
    "search": [(151_936, 256, 2, 2, 1_324, 176, 1 / 3)],
}
FORMS = ("ours", "full", "TRL", "Liger")


def make_lm(vocabulary: int, width: int, layers: int):
    """A random decoder of Qwen2.5-0.5B's proportions; the flop of a token in its body come with it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    options = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 38 // 7,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        max_position_embeddings=8192,
    )
    return Qwen2ForCausalLM(options)


def make_rows(case) -> dict[str, torch.Tensor]:
    vocabulary, _, _, B, T, prompt, share = case
    generator = torch.Generator().manual_seed(1)
    token_ids_BT = torch.randint(2, vocabulary, (B, prompt + T), generator=generator)
    written_BT = torch.zeros(B, prompt + T, dtype=torch.bool)
    # The model writes, a passage follows, and so on; an action ends the row
    block = max(1, round(128 * share))
    written_BT[:, prompt:] = (torch.arange(T).flip(0) % round(block / share)) < block
    return {
        "token_ids_BT": token_ids_BT,
        "written_BT": written_BT,
        "advantages_B": torch.linspace(-1.0, 1.5, B),
        "old_BT": torch.full((B, prompt + T), -math.log(vocabulary)) * written_BT,
    }


def our_step(lm, rows, optimizer, full: bool):
    from accelerate import Accelerator

    from lld.episode import Batch
    from lld.policy import Policy
    from lld.update import update_policy

    class FullLogits(Policy):
        def forward(self, token_ids_BT, scored_BT, temperature=1.0, entropy_gradient=False, kept=None):
            first = int(scored_BT.any(0).nonzero()[0])
            logits_BTV = (
                self.lm(
                    token_ids_BT, use_cache=False, logits_to_keep=token_ids_BT.shape[1] - first + 1
                ).logits[:, :-1]
                / temperature
            )
            logp_BTV = logits_BTV.log_softmax(-1)
            logprobs_BT = logp_BTV.gather(-1, token_ids_BT[:, first:, None])[..., 0]
            with torch.no_grad():
                entropy_BT = -(logp_BTV.exp() * logp_BTV).sum(-1)
            return tuple(
                torch.where(scored_BT, torch.nn.functional.pad(x, (first, 0)), 0.0)
                for x in (logprobs_BT, entropy_BT)
            )

    B, width = rows["token_ids_BT"].shape
    cfg = settings_module.from_dict(
        {
            "loss": {"kl_weight": 0.0, "lld_weight": 0.0, "old_logprobs": "sampler"},
            "optim": {"updates_per_rollout": 1, "micro_batch_size": B},
            "model": {"mixed_precision": "no"},
        }
    )
    written_BT = rows["written_BT"].long()
    batch = Batch(
        rows["token_ids_BT"],
        written_BT,
        written_BT,
        rows["old_BT"],
        rows["advantages_B"],
        torch.full((B,), width),
        tuple(map(str, range(B))),
    )
    accelerator, policy = Accelerator(cpu=True), (FullLogits if full else Policy)(lm)
    return lambda: update_policy(accelerator, policy, None, optimizer, batch, cfg, beta=1.0)[0][0][
        "grad_norm"
    ]


def other_inputs(rows) -> dict[str, torch.Tensor]:
    prompt = int(rows["written_BT"].any(0).nonzero()[0])
    ids_BT, mask_BT = rows["token_ids_BT"], rows["written_BT"][:, prompt:].long()
    return {
        "prompt_ids": ids_BT[:, :prompt],
        "prompt_mask": torch.ones_like(ids_BT[:, :prompt]),
        "completion_ids": ids_BT[:, prompt:],
        "completion_mask": torch.ones_like(mask_BT),
        "tool_mask": mask_BT,
        "advantages": rows["advantages_B"],
        "old_per_token_logps": rows["old_BT"][:, prompt:],
        "num_items_in_batch": mask_BT.sum(),
    }


def trl_step(lm, rows, optimizer):
    import tempfile

    from conftest import make_tokenizer
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    options = GRPOConfig(
        tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        beta=0.0,
        loss_type="grpo",
        report_to=[],
        num_generations=2,
        per_device_train_batch_size=2,
        temperature=1.0,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    trainer = GRPOTrainer(
        lm,
        lambda completions, **_: [0.0] * len(completions),
        options,
        Dataset.from_list([{"prompt": "who?"}] * 4),
        processing_class=make_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    inputs = other_inputs(rows)
    lm.train()
    return lambda: finish(lm, optimizer, trainer.compute_loss(lm, inputs))


def liger_step(lm, rows, optimizer):
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    inputs = other_inputs(rows)
    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="grpo")
    T = inputs["completion_ids"].shape[1]

    def step():
        hidden_BTC = lm.model(rows["token_ids_BT"], use_cache=False).last_hidden_state[:, -T - 1 : -1]
        value, _ = loss(
            hidden_BTC,
            lm.lm_head.weight,
            inputs["completion_ids"],
            inputs["tool_mask"],
            inputs["advantages"],
            old_per_token_logps=inputs["old_per_token_logps"],
        )
        return finish(lm, optimizer, value)

    return step


def finish(lm, optimizer, loss) -> float:
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0))
    optimizer.step()
    optimizer.zero_grad()
    return norm


def measure(form: str, case, steps: int) -> dict:
    """In a process of its own: seconds, megabytes, the gradient norm of the first step, and the bound."""
    lm, rows = make_lm(*case[:3]).train(), make_rows(case)
    lm.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-6, fused=True)
    for parameter in lm.parameters():  # moments are there before the step that is measured
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter).add_(0),
            "exp_avg_sq": torch.zeros_like(parameter).add_(0),
        }
    step = {
        "ours": lambda: our_step(lm, rows, optimizer, False),
        "full": lambda: our_step(lm, rows, optimizer, True),
        "TRL": lambda: trl_step(lm, rows, optimizer),
        "Liger": lambda: liger_step(lm, rows, optimizer),
    }[form]()
    a = torch.randn(2048, 2048)
    a @ a
    start = time.process_time()
    for _ in range(4):
        a @ a
    rate = 8 * 2048**3 / (time.process_time() - start)  # flop per second of a processor
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    norms, cpu_s, wall_s = [], [], []
    for _ in range(steps):
        cpu, wall = time.process_time(), time.perf_counter()
        norms.append(step())
        cpu_s.append(time.process_time() - cpu)
        wall_s.append(time.perf_counter() - wall)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    vocabulary, width, layers, B = case[:4]
    T, scored = rows["token_ids_BT"].shape[1], int(rows["written_BT"].sum())
    body = sum(p.numel() for p in lm.model.layers.parameters())
    # Causal attention: 2 products of T^2 / 2 x width, forward twice, backward twice that
    flop = 8 * body * B * T + 6 * vocabulary * width * scored + 8 * layers * B * T * T * width
    return {
        "cpu_s": min(cpu_s),
        "wall_s": min(wall_s),
        "mb": peak / 2**20,
        "norm": norms[0],
        "bound_s": flop / rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", help="a Python with TRL and Liger; without it only ours and full")
    parser.add_argument("--only", default=",".join(CASES), help="groups of cases")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        form, case = json.loads(args.measure)
        print("MEASURED", json.dumps(measure(form, case, args.steps)))
        return
    print(
        "| vocabulary | width x layers | rows x tokens | scored | form | s (processor) | s (wall) | least "
        "s | against full | peak MB in use over weights and moments | against full | peak MB resident | "
        "against full | gradient norm |\n" + "|---" * 14 + "|"
    )
    for group in args.only.split(","):
        for case in CASES[group]:
            rows, full = make_rows(case), None
            order = sorted(
                (form for form in args.forms.split(",") if args.trl_python or form in ("ours", "full")),
                key=lambda form: form != "full",
            )
            for form in order:
                python = args.trl_python if form in ("TRL", "Liger") else sys.executable
                found = []
                for returned in (False, True):
                    command = [
                        python,
                        __file__,
                        "--steps",
                        "1" if returned else str(args.steps),
                        "--measure",
                        json.dumps([form, case]),
                    ]
                    settings = {"OMP_NUM_THREADS": str(args.threads), "OMP_WAIT_POLICY": "PASSIVE"} | (
                        {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
                        if returned
                        else {}
                    )
                    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
                    found += [line for line in done.stdout.splitlines() if line.startswith("MEASURED")]
                B, T = rows["token_ids_BT"].shape
                name = (
                    f"| {case[0]:,} | {case[1]} x {case[2]} | {B} x {T} | "
                    f"{int(rows['written_BT'].sum()):,} | {form} |"
                )
                if len(found) < 2:
                    print(f"{name} {(done.stderr.strip().splitlines() or ['no word'])[-1]} |", flush=True)
                    continue
                row, in_use = (json.loads(line.partition(" ")[2]) for line in found)
                row["in_use_mb"] = in_use["mb"]
                full = row if form == "full" else full

                def against(name):
                    return f"{row[name] / full[name]:.2f}" if full else ""

                memory = " | ".join(f"{row[name]:,.0f} | {against(name)}" for name in ("in_use_mb", "mb"))
                print(
                    f"{name} {row['cpu_s']:.2f} | {row['wall_s']:.2f} | {row['bound_s']:.2f} | "
                    f"{against('cpu_s')} | {memory} | {row['norm']:.5g} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
