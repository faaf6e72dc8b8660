"""Tokens per second and memory of our rollout over concurrent episodes, and the cost of a turn over the turns
before it.

    python tests/bench/rollout_scaling.py --world FOLDER [--slots 8 32 128 512] [--cpu]

Policy, questions and search of a tiny world (tests/bench/rollout_speed.py). First table: as many episodes as
slots, each played to its end; memory is that of keys and values. Second table: 32 episodes that are made to
say 20 tokens a turn and read 53 after it, 6 times: seconds of each turn, the tokens fed to the model in it,
which must not grow, and what running the whole history again would have fed. Threads: OMP_NUM_THREADS.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from rollout_speed import clock, ours, tiny_world

from lld.data import load_questions
from lld.engine.engine import Engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=Path, required=True)
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 32, 128, 512])
    parser.add_argument("--cpu", action="store_true", help="processor seconds")
    args = parser.parse_args()
    world = tiny_world(args.world)
    questions, world.num_samples = load_questions(str(args.world / "train.jsonl")), 4
    print(
        "\n| episodes at once | kept tokens | seconds | kept tokens/s | MB of keys and values "
        "|\n|---|---|---|---|---|"
    )
    for slots in args.slots:
        world.questions = questions[: slots // world.num_samples]
        ours(world)
        began = clock()
        kept = sum(ours(world) for _ in range(max(1, 128 // slots)))
        took = clock() - began
        print(
            f"| {slots} | {kept} | {took:.2f} | {kept / took:.0f} | "
            f"{world.engine.cache.keys_values.numel() * 4 / 1e6:.0f} |"
        )

    engine = Engine(
        world.lm, world.tokenizer, num_slots=32, temperature=1.0, top_p=1.0, stop_strings=(), eos_ids=()
    )
    prompt, observation, spoken = world.prompts()[0], [20] * 53, 20
    rows = []
    for _ in range(3):
        engine.add(0, prompt, list(range(32)), spoken)
        rows.append([])
        for turn in range(1, 7):
            began, fed, stopped = clock(), engine.num_fed, []
            while len(stopped) < 32:
                stopped += engine.step()
            rows[-1].append((clock() - began, engine.num_fed - fed))
            for turned in stopped:
                engine.release(turned.key) if turn == 6 else engine.extend(turned.key, observation, spoken)
    print("\n| turn | seconds (best of 3) | tokens fed | fed if the history ran again |\n|---|---|---|---|")
    for turn, tries in enumerate(zip(*rows, strict=True)):
        history = 32 * (len(prompt) + turn * (spoken + len(observation)) + spoken - 1)
        print(f"| {turn + 1} | {min(took for took, _ in tries):.3f} | {tries[-1][1]} | {history} |")


if __name__ == "__main__":
    main()
