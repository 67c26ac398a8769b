"""What `--piper-dispatcher-stats` counts, against the routing maps; where it is logged."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from tiny import ROOT, tiny_command

TRAIN = Path(__file__).parent / "pretrain_with_writers.py"
ALGORITHMS = ("flat", "2dh", "halo", "rail", "rbd")
DIRECTIONS = ("dispatch", "combine", "dispatch_backward", "combine_backward")
NODES, PER_NODE, HIDDEN, FLOAT_BYTES = 2, 2, 16, 4


def count_rows(algorithms: tuple[str, ...]) -> tuple[dict, dict[str, dict]]:
    """What truly goes to other ranks and nodes, and the statistics of a layer with each algorithm.

    The layer is evaluated once, which does not count, and trained twice.
    """
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from moe_layer import LayerSizes, build_layer, expert_groups, train_layer, with_dispatcher

    from piper_megatron.runtime.dispatch.stats import LayerRecorder, summarize

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=NODES * PER_NODE)
    groups = expert_groups(NODES)
    plain = build_layer(LayerSizes(hidden=HIDDEN, expert_ffn=8, experts=8, topk=3, tokens=24))
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(24, HIDDEN, generator=generator) for _ in range(2)]
    truth = torch.zeros(2, dtype=torch.long)
    for tokens in batches:
        routing_map = plain.route(tokens.unsqueeze(1))[1]
        far = routing_map.unflatten(1, (NODES, -1))
        far[:, groups.node_index] = False
        truth += torch.stack([far.sum(), far.any(2).sum()])
    dist.all_reduce(truth)
    statistics = {}
    for algorithm in algorithms:
        recorder = LayerRecorder(plain, algorithm)
        layer = with_dispatcher(plain, algorithm, groups, recorder)
        plain.eval()
        train_layer(layer, batches[0])
        plain.train()
        for tokens in batches:
            train_layer(layer, tokens)
        stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        (summary,) = summarize(stage, iterations=2)
        statistics[algorithm] = asdict(summary)
        del layer, recorder
    pairs, rows = truth.tolist()
    return {"pairs": pairs / 2, "rows": rows / 2}, statistics


@pytest.fixture(scope="module")
def counted(ranks):
    """One run for all tests: (truth, statistics), the same on all ranks."""
    run = ranks.call(count_rows, ALGORITHMS, world=NODES * PER_NODE).check()
    (truth, statistics), *others = run.values
    assert all(other == (truth, statistics) for other in others)
    return truth, statistics


def by_hop(layer: dict, direction: str) -> dict[str, dict]:
    (found,) = [d for d in layer["directions"] if d["direction"] == direction]
    return {hop["hop"]: hop for hop in found["hops"]}


def total(layer: dict, direction: str, quantity: str) -> float:
    return sum(hop[quantity] for hop in by_hop(layer, direction).values())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rows_between_nodes_are_those_of_the_routing_maps(counted, algorithm, direction):
    truth, statistics = counted
    once_a_node = algorithm in ("rail", "rbd")
    expected = truth["rows" if once_a_node else "pairs"]
    assert truth["rows"] < truth["pairs"]
    assert total(statistics[algorithm], direction, "rows_between_nodes") == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_redundancy_removed_is_the_share_of_routed_rows_that_do_not_cross(counted, algorithm):
    truth, statistics = counted
    layer = statistics[algorithm]
    assert layer["routed_rows_between_nodes"] == truth["pairs"]
    removed = 1 - truth["rows"] / truth["pairs"] if algorithm in ("rail", "rbd") else 0
    assert layer["redundancy_removed"] == pytest.approx(removed)


@pytest.mark.parametrize("algorithm", ["flat", "2dh", "halo"])
def test_bytes_are_those_of_rows_and_probabilities(counted, algorithm):
    truth, statistics = counted
    layer = statistics[algorithm]
    row_bytes = HIDDEN * FLOAT_BYTES
    sent = total(layer, "dispatch", "bytes_between_nodes")
    assert sent == truth["pairs"] * (row_bytes + FLOAT_BYTES)
    assert total(layer, "combine", "bytes_between_nodes") == truth["pairs"] * row_bytes


@pytest.mark.parametrize("algorithm", ["rail", "rbd"])
def test_bytes_of_relays_hold_a_byte_of_routing_bits_a_row(counted, algorithm):
    truth, statistics = counted
    layer = statistics[algorithm]
    row_bytes = HIDDEN * FLOAT_BYTES
    sent = total(layer, "dispatch", "bytes_between_nodes")
    assert sent == truth["rows"] * (row_bytes + 1) + truth["pairs"] * FLOAT_BYTES


def test_messages_between_nodes_follow_the_rails(counted):
    _, statistics = counted

    def messages(algorithm: str) -> float:
        return total(statistics[algorithm], "combine", "messages_between_nodes")

    ranks = NODES * PER_NODE
    assert messages("flat") == ranks * (NODES - 1) * PER_NODE
    assert messages("2dh") == messages("halo") == messages("rail") == ranks * (NODES - 1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_hops_and_directions_have_times(counted, algorithm):
    for direction in counted[1][algorithm]["directions"]:
        assert 0 < direction["ms_mean"] <= direction["ms_max"]
        for hop in direction["hops"]:
            assert 0 < hop["ms_mean"] <= hop["ms_max"]


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """A training on 2x2, statistics every second iteration: its file, and what writers got."""
    folder = tmp_path_factory.mktemp("stats")
    written = folder / "written.jsonl"
    command = tiny_command(
        *"--piper-grid 2x2 --piper-dispatcher rail --piper-node-size 1".split(),
        *"--piper-dispatcher-stats --log-interval 2 --mtp-num-layers 1".split(),
        *f"--tensorboard-dir {folder}/tensorboard --wandb-save-dir {folder}/wandb".split(),
        *"--wandb-project project --wandb-exp-name experiment".split(),
        iterations=5,
    )
    ranks.run(TRAIN, command, 4, env={"WRITTEN": str(written)}).check()
    lines = (folder / "tensorboard" / "piper_dispatcher_stats.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], [
        json.loads(line) for line in written.read_text().splitlines()
    ]


def test_a_line_for_each_layer_of_all_stages_at_the_log_interval(trained):
    lines, _ = trained
    layers = ["1", "2", "3", "4", "mtp_1"]
    assert [(line["iteration"], line["layer"]) for line in lines] == [
        (iteration, layer) for iteration in (2, 4) for layer in layers
    ]


def test_a_line_holds_an_iteration_of_the_ranks_that_share_the_layer(trained):
    """2 ranks on pretended nodes of one, 8 sequences of 32 tokens, top-2 of 4 experts."""
    lines, _ = trained
    for line in lines:
        assert line["algorithm"] == "rail"
        assert line["ranks"] == 2
        sent = total(line, "dispatch", "rows_between_nodes")
        routed = line["routed_rows_between_nodes"]
        # about half of the (token, expert) pairs, and no token twice
        assert 0 < routed < 8 * 32 * 2
        assert 0 < sent <= 8 * 32
        assert line["redundancy_removed"] == pytest.approx(1 - sent / routed)
        assert total(line, "combine_backward", "rows_between_nodes") == sent


@pytest.mark.parametrize("writer", ["tensorboard", "wandb"])
def test_writers_get_the_numbers_of_the_lines(trained, writer):
    lines, written = trained
    prefix = "piper_dispatcher/"
    scalars = {
        (name.removeprefix(prefix), iteration): value
        for kind, name, value, iteration in written
        if kind == writer and name.startswith(prefix)
    }
    expected = {}
    for line in lines:
        layer, iteration = f"layer_{line['layer']}", line["iteration"]
        expected[f"{layer}/redundancy_removed", iteration] = line["redundancy_removed"]
        for direction in line["directions"]:
            at = f"{layer}/{direction['direction']}"
            expected |= {(f"{at}/{q}", iteration): direction[q] for q in ("ms_mean", "ms_max")}
            for hop in direction["hops"]:
                name = f"{at}/{hop['hop'].replace(' ', '_')}"
                quantities = hop.keys() - {"hop"}
                expected |= {(f"{name}/{q}", iteration): hop[q] for q in quantities}
    assert scalars == expected


def test_without_the_flag_nothing_is_written(ranks, tmp_path):
    command = tiny_command(
        *f"--piper-grid 2x2 --piper-dispatcher flat --tensorboard-dir {tmp_path}".split(),
        iterations=1,
    )
    ranks.run(TRAIN, command, 4, env={"WRITTEN": str(tmp_path / "written.jsonl")}).check()
    assert not list(tmp_path.rglob("piper_dispatcher_stats.jsonl"))
