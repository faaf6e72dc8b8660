"""Where a rollout's time goes: one rollout under torch.profiler, the costliest operations first.

    python tests/bench/profile_step.py --world FOLDER [--policy 0.5b] [--rows 20]

The table gives each operation's own processor time and calls, and what share of all it is. `--policy 0.5b`
takes the shaped policy of tests/bench/rollout_speed.py at an eighth of Search-R1's lengths. Threads:
OMP_NUM_THREADS.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from rollout_speed import half_billion_world, ours, tiny_world
from torch.profiler import ProfilerActivity, profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=Path)
    parser.add_argument("--policy", choices=("tiny", "0.5b"), default="tiny")
    parser.add_argument("--rows", type=int, default=20)
    args = parser.parse_args()
    world = tiny_world(args.world) if args.policy == "tiny" else half_billion_world(8, 1)
    if args.policy == "tiny":
        ours(world)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        kept = ours(world)
    events = sorted(profiled.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    print(
        f"\n{kept} kept tokens, {total / 1e3:.0f} ms in {sum(event.count for event in events)} "
        "operations\n\n| operation | own ms | share | calls |\n|---|---|---|---|"
    )
    for event in events[: args.rows]:
        print(
            f"| {event.key} | {event.self_cpu_time_total / 1e3:.1f} | "
            f"{event.self_cpu_time_total / total:.0%} | {event.count} |"
        )


if __name__ == "__main__":
    main()
