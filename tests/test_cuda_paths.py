"""The CUDA paths on a pretended device (tests/cuda/), or on the GPU that is here: whole programs, waits,
kernels, numbers.

What is counted (waits, launches, the kernel of attention) is known of the pretended device only.
LLD_REAL_GPU=1 asks for the GPU; without it and without g++ nothing here runs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "cuda"))
import start

REAL = "LLD_REAL_GPU" in os.environ
pytestmark = pytest.mark.skipif(not REAL and start.why_not() is not None, reason=str(start.why_not()))
counted = pytest.mark.skipif(REAL, reason="counted on the pretended device only")
LAYER_LAUNCHES, OTHER_LAUNCHES = 13, 36


def run_checks(folder: Path, *names: str, launch: tuple[str, ...] = ()) -> dict:
    """What the checks found, by name."""
    script = Path(__file__).parent / "cuda" / "checks.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        [sys.executable, *launch, str(script), str(folder), *names],
        capture_output=True,
        text=True,
        timeout=900,
        env=environment,
    )
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: result for name, result in found.items() if "cpu_s" in result}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cuda")


@pytest.fixture(scope="module")
def quick(folder):
    return run_checks(folder)


def result(found: dict, name: str) -> dict:
    assert "error" not in found[name], found[name]["error"]
    return found[name]


def per_step(seen: dict, what: str, steps: int = 12) -> float:
    return sum(seen[what].values()) / steps


def kernels(seen: dict) -> set[str]:
    """Kernels of attention in half precision, on Hopper and on Ampere."""
    choices = [key.split()[0] for key in seen["sdpa"] if "float16" in key]
    return {kernel for choice in choices for kernel in choice.split("/")}


def test_tokens_of_the_device_are_those_of_the_cpu(quick):
    found = result(quick, "sampling")
    for kind in ("qwen2", "llama", "qwen3"):
        for how in ("eager", "graphs", "apart"):
            case = found[f"{kind} float32 {how}"]
            assert case["same"] == case["turns"] == 12 and case["gap"] < 1e-4, (kind, how)
    assert found["greedy"]["same"] == found["top-p"]["same"] == 12


def test_graphs_draw_the_tokens_of_eager_steps_in_bf16(quick):
    for case in (result(quick, "sampling")["qwen2 bfloat16 graphs"], result(quick, "flash_attn")["graphs"]):
        assert case["same"] == case["turns"] and case["gap"] < 1e-5
    assert result(quick, "sampling")["qwen2 bfloat16 graphs"]["buffers"] == ["torch.float32"]


def test_the_engines_attention_is_that_of_each_row_by_itself(quick):
    found = result(quick, "attending")
    assert found["float32"]["error"] < 1e-5
    assert found["bfloat16"]["error"] < 0.01 and found["flash-attn"]["error"] < 0.01


@counted
def test_flash_attn_attends_one_token_a_row_without_asking_the_device(quick):
    """Its block tables would: what stands in for it counts a wait for each."""
    found = result(quick, "flash_attn")
    for how in ("eager", "graphs"):
        seen = found[how]["seen"]
        assert seen["varlen"]["kvcache"] > 0 and not seen["sdpa"]
        assert {place.split()[0] for place in seen["waits"]} == {"tolist"}
    assert found["graphs"]["seen"]["graphs"]["replayed"] > 4


@counted
def test_steps_are_captured_and_a_capture_holds_no_question_to_the_device(quick):
    seen = result(quick, "sampling")["qwen2 bfloat16 graphs"][
        "seen"
    ]  # a host read or copy inside a capture would have raised
    assert seen["graphs"]["captured"] >= 1 and seen["graphs"]["replayed"] > 4


def test_the_benchmark_of_decode_steps_runs_in_each_of_its_modes(quick):
    found = result(quick, "decoding")
    for mode in ("eager", "graphs", "flash-attn", "flash-attn graphs"):
        case = found[mode]
        assert case["decode_ms"] > 0 and case["prefill_tokens_per_s"] > 0 and case["mode"] == mode
        assert REAL or bool(case["seen"]["graphs"]) == mode.endswith("graphs")
        assert REAL or ("kvcache" in case["seen"]["varlen"]) == mode.startswith("flash-attn")


@counted
def test_a_decode_step_waits_for_the_device_once(quick):
    """For the tokens drawn, also with top-p; all that the step tells the device goes there in one copy."""
    found = result(quick, "steps")
    for name in ("decode 2", "decode 4", "top-p 2"):
        assert per_step(found[name], "waits") == per_step(found[name], "copies") == 1, (
            name,
            found[name]["waits"],
        )


@counted
def test_shapes_of_attention_do_not_follow_the_rows_lengths(quick):
    """12 steps have one, also where cuDNN, which builds a plan for each, is not asked; the cache stays where
    it is."""
    found = result(quick, "steps")
    assert (
        found["decode 2"]["shapes"] == 1
        and found["decode 2"]["cache stays"]
        and found["rollout"]["shapes"] <= 3
    )


@counted
def test_launches_of_a_decode_step(quick):
    found = result(quick, "steps")
    two, four = (per_step(found[f"decode {layers}"], "launches") for layers in (2, 4))
    layer = (four - two) / 2
    assert layer <= LAYER_LAUNCHES and two - 2 * layer <= OTHER_LAUNCHES, (layer, two - 2 * layer)
    autocast = per_step(found["autocast 2"], "launches")
    assert autocast == two, "a step of bf16 weights casts nothing, also under the trainer's autocast"


@counted
def test_attention_in_bf16_never_takes_the_math_kernel(quick):
    found = result(quick, "steps")
    whole = [result(quick, name)["seen"] for name in ("training", "evaluating")]
    seen = [found["decode 2"], found["prefill 2"], found["rollout"], *whole]
    assert all(some["sdpa"] for some in seen)
    assert not {"math", "cudnn"} & set().union(*map(kernels, seen))
    assert not {"math"} & {
        kernel
        for key in result(quick, "attending")["float32"]["seen"]["sdpa"]
        for kernel in key.split()[0].split("/")
    }


@counted
def test_the_pretended_device_notices_mistakes(quick):
    """A tensor without `device=`, and one more question to the device in each step."""
    found = result(quick, "mutations")
    for name in ("engine", "attention"):
        assert "same device" in found[name], found[name]
    assert any(place.startswith("item @ engine.py") for place in found["asking"]["waits"])


def test_searches_find_the_same_on_the_device_and_from_other_threads(quick):
    found = result(quick, "searching")
    ways = ("float16", "int8")
    assert found["cpu"] == found["float16"] == found["two devices"]
    assert all(found[way] == found[f"{way}, {where}"] for way in ways for where in ("pool", "autocast"))


def test_an_encoder_on_the_second_device_serves_a_pools_threads(quick):
    found = result(quick, "searching_on_rank_1")
    if "skipped" in found:
        pytest.skip(found["skipped"])
    assert found["shape"] == [1, 32]


def test_influence_is_that_of_the_cpu(quick):
    assert result(quick, "influence")["gap"] < 1e-4


def test_a_run_in_bf16_trains_resumes_and_logs(quick):
    found = result(quick, "training")
    assert found["codes"] == [0, 0] and [row["step"] for row in found["rows"]] == [0, 1]
    assert all(row["sampler_gap/max"] < 0.1 and row["skipped_updates"] == 0 for row in found["rows"])
    assert all("eval/tiny/em" in row for row in found["rows"])


@counted
def test_packed_rows_go_through_the_varlen_kernel(quick):
    calls = result(quick, "training")["seen"]["varlen"]
    assert calls["forward"] > calls["backward"] > 0


def test_the_rotary_frequencies_of_an_evaluation_stay_float32(quick):
    found = result(quick, "evaluating")
    assert found["code"] == 0 and found["weights"] == ["torch.bfloat16"]
    assert found["buffers"] == ["torch.float32"]


# ---- longer than a test should take: .ci/run runs these by themselves --------------------------------------


@pytest.fixture(scope="module")
def whole(folder):
    return run_checks(folder, "offloading", "float32", "adapting")


@pytest.mark.whole_runs
@pytest.mark.parametrize("name", ["offloading", "float32", "adapting"])
def test_a_whole_run_trains_and_resumes(whole, name):
    found = result(whole, name)
    assert found["codes"] == [0, 0] and [row["step"] for row in found["rows"]] == [0, 1]
    assert all(row["skipped_updates"] == 0 for row in found["rows"])
    assert REAL or found["seen"]["graphs"]["replayed"] > 0
    assert REAL or not any(choice.startswith("math") for choice in found["seen"]["sdpa"])


@pytest.mark.whole_runs
@counted
def test_a_run_sharded_over_two_processes_trains_and_resumes(whole, folder):
    """FSDP2 in bf16: gathered, computed, reduced and saved as on GPUs, with gloo in NCCL's place."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    found = result(run_checks(folder, "sharding", launch=launch), "sharding")
    assert found["codes"] == [0, 0] and [row["step"] for row in found["rows"]] == [0, 1]
    assert all(row["skipped_updates"] == 0 and row["sampler_gap/max"] < 0.1 for row in found["rows"])
    assert found["seen"]["varlen"]["backward"] > 0
