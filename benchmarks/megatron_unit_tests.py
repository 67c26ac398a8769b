"""Runs Megatron's own dispatcher unit tests with its alltoall dispatcher replaced by Piper's.

    git clone --branch core_r0.19.0 https://github.com/NVIDIA/Megatron-LM
    python benchmarks/megatron_unit_tests.py Megatron-LM

Eight ranks on the CPU backend, forks of one process. Megatron itself is the installed release; of
the checkout only the tests are used, so take the branch of that release. Prints a line for each
algorithm and size of the pretended nodes; fails if any test fails or ends in another way than with
Megatron's own dispatcher.
"""

import argparse
import os
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from ranks import RankServer

from piper_megatron.workload.dispatcher_flags import ALGORITHMS

WORLD = 8
TESTS = "tests/unit_tests/transformer/moe/test_a2a_token_dispatcher.py"
Outcomes = dict[str, str]


def run_tests(
    checkout: str, tests: list[str], algorithm: str | None, members_per_node: int
) -> Outcomes:
    """What became of each test on this rank; runs in a fork of the rank server.

    Args:
        checkout: folder of Megatron-LM.
        tests: paths in it, or pytest's node ids.
        algorithm: Piper's; None for Megatron's own dispatcher.
        members_per_node: of an expert group, on a pretended node; smaller groups are on one.
    """
    import pytest

    if algorithm is not None:
        _replace_dispatcher(algorithm, members_per_node)
    os.chdir(checkout)
    sys.path.insert(0, checkout)
    _leave_out_the_download()
    outcomes: Outcomes = {}

    class Outcome:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                outcomes[report.nodeid] = report.outcome

    pytest.main(["-q", "-rf", "-p", "no:cacheprovider", *tests], plugins=[Outcome()])
    return outcomes


def _leave_out_the_download() -> None:
    """Keeps the session's fixture from fetching data sets, which these tests do not read."""
    name = "tests.test_utils.python_scripts.download_unit_tests_dataset"
    module = ModuleType(name)
    module.download_and_extract_asset = lambda assets_dir: None  # type: ignore[attr-defined]
    sys.modules[name] = module


def _replace_dispatcher(algorithm: str, members_per_node: int) -> None:
    from megatron.core.transformer.moe import moe_layer

    from piper_megatron.runtime.dispatch.dispatcher import DispatcherSpec
    from piper_megatron.runtime.dispatch.groups import split_group

    def build(
        num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any
    ) -> Any:
        hosts = [f"node {i // members_per_node}" for i in range(pg_collection.ep.size())]
        groups = split_group(pg_collection.ep, hosts, timedelta(minutes=1))
        assert groups is not None
        return DispatcherSpec(algorithm, groups, chunks=2).build(
            num_local_experts, local_expert_indices, config, pg_collection
        )

    moe_layer.MoEAlltoAllTokenDispatcher = build


def main() -> None:
    """Runs every algorithm on every size of nodes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="folder of Megatron-LM")
    parser.add_argument(
        "tests", nargs="*", default=[TESTS], help="paths in it (default %(default)s)"
    )
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument(
        "--members-per-node", nargs="+", type=int, default=[1, 2, 4], help="sizes of nodes"
    )
    arguments = parser.parse_args()
    server = RankServer(python_path=str(Path(__file__).parent))
    failed = False

    def run(algorithm: str | None, members_per_node: int) -> list[Outcomes]:
        nonlocal failed
        done = server.call(
            run_tests,
            str(arguments.checkout.resolve()),
            arguments.tests,
            algorithm,
            members_per_node,
            world=WORLD,
            timeout_s=600,
        )
        outcomes = [value or {} for value in done.values]
        counts = Counter(outcomes[0].values())
        name = f"{algorithm}, {members_per_node} a node" if algorithm else "Megatron's own"
        print(f"{name:20} {dict(sorted(counts.items()))} in {done.seconds:.0f} s", flush=True)
        if any(done.codes) or "failed" in {o for each in outcomes for o in each.values()}:
            failed = True
            print(done.outputs[0][-8000:])
        return outcomes

    megatrons = run(None, WORLD)
    for algorithm in arguments.algorithms:
        for members_per_node in arguments.members_per_node:
            if run(algorithm, members_per_node) != megatrons:
                failed = True
                print("differs from Megatron's own")
    server.close()
    sys.exit(failed)


if __name__ == "__main__":
    # pickled jobs name the functions of this module as the ranks know it
    import megatron_unit_tests

    megatron_unit_tests.main()
