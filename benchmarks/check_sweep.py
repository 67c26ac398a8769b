"""Compares the check's verdict with the real Megatron's on many random commands.

    python benchmarks/check_sweep.py [COMMANDS] [SEED]

Half are variations of `tests/random_commands.py`, half set any of Megatron's options to any value
that its type takes, so that faults nobody thought of come up. Prints every disagreement; 10,000
commands take some two minutes.
"""

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from megatron_judge import gpu_job, judge
from random_commands import any_command, random_command
from test_check_legality import disagreement


def main() -> int:
    """Runs the sweep; the exit code says whether all verdicts agree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("commands", type=int, nargs="?", default=10_000)
    parser.add_argument("seed", type=int, nargs="?", default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    places: Counter[str] = Counter()
    differing = []
    with gpu_job():
        for i in range(args.commands):
            tokens, gpus = (random_command if i % 2 else any_command)(rng)
            refusal = judge(tokens, gpus)
            places[refusal.at if refusal else "starts"] += 1
            if found := disagreement(tokens, gpus, refusal):
                differing.append(found)
    print("\n".join(differing))
    refused = args.commands - places["starts"]
    print(
        f"{args.commands} commands, {refused} refused at {len(places) - 1} places: "
        f"{len(differing)} disagreements"
    )
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
