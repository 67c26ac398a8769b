"""The CPU backend's parts: what gives way, what is told, what is refused, and the way back."""

import importlib.util
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import RankServer
from test_run import piper_megatron
from tiny import SCRIPT, tiny_command

from piper_megatron.runtime.cpu.arguments import REFUSALS, TRANSLATIONS, attribute_of
from piper_megatron.runtime.cpu.attention import causal_rows, chunks_of, in_order

BY_DEFAULT = {
    "--transformer-impl transformer_engine becomes local": ("transformer_impl", "local"),
    "--no-masked-softmax-fusion added": ("masked_softmax_fusion", False),
    "--no-rope-fusion added": ("apply_rope_fusion", False),
    "--no-persist-layer-norm added": ("no_persist_layer_norm", True),
    "--no-gradient-accumulation-fusion added": ("gradient_accumulation_fusion", False),
    "--distributed-backend nccl becomes gloo": ("distributed_backend", "gloo"),
}
ON_REQUEST = {
    "--moe-grouped-gemm": ("dropped", "moe_grouped_gemm", False),
    "--moe-permute-fusion": ("dropped", "moe_permute_fusion", False),
    "--moe-token-dispatcher-type flex": (
        "becomes alltoall",
        "moe_token_dispatcher_type",
        "alltoall",
    ),
    "--fp8-format hybrid": ("--fp8-format dropped", "fp8", None),
    "--attention-backend flash": ("becomes unfused", "attention_backend", "unfused"),
    "--tp-comm-overlap": ("dropped", "tp_comm_overlap", False),
    "--cuda-graph-impl local": ("becomes none", "cuda_graph_impl", "none"),
    "--cuda-graph-modules attn moe": ("--cuda-graph-modules dropped", "cuda_graph_modules", []),
    "--use-nccl-ub": ("dropped", "nccl_ub", False),
    "--exp-avg-dtype bf16": ("becomes fp32", "exp_avg_dtype", "fp32"),
    "--recompute-modules moe_act layernorm": (
        "--recompute-modules moe_act dropped",
        "recompute_modules",
        ["layernorm"],
    ),
    "--profile": ("--profile dropped", "profile", False),
}
REFUSED = {
    "--transformer-impl": "--transformer-impl inference_optimized",
    "--use-megatron-fsdp": "--use-megatron-fsdp",
    "--use-torch-fsdp2": "--use-torch-fsdp2",
    "--tensor-parallel-num-weight-shards": "--tensor-parallel-num-weight-shards 2",
    "--expert-tensor-parallel-num-weight-shards": "--expert-tensor-parallel-num-weight-shards 2",
    "--moe-latent-size": "--moe-latent-size 16",
    "--experimental-attention-variant": "--experimental-attention-variant dsa",
    "--position-embedding-type": "--position-embedding-type relative",
    "--apply-layernorm-1p": "--apply-layernorm-1p",
    "--qk-clip": "--qk-clip",
    "--log-max-attention-logit": "--log-max-attention-logit",
    "--sft": "--sft",
    "--dataloader-inter-document-masking": "--dataloader-inter-document-masking",
    "--hybrid-layer-pattern": "--hybrid-layer-pattern M*M-",
    "--batch-invariant-mode": "--batch-invariant-mode",
    "--window-size": "--window-size 8,0 --context-parallel-size 2",
}


def translations(commands: list[str]) -> list[tuple[list[str], list[str], dict]]:
    """Lines of a first and a second translation, and what changed, for each command line."""
    from megatron.training.arguments import parse_args

    from piper_megatron.errors import CpuBackendError
    from piper_megatron.runtime import cpu

    results = []
    for command in commands:
        sys.argv = ["job", *command.split()]
        args = parse_args()
        before = dict(vars(args))
        try:
            lines = cpu.translate(args)
        except CpuBackendError as error:
            results.append(([str(error)], [], {}))
            continue
        changed = {
            name: getattr(value, "name", value)
            for name, value in vars(args).items()
            if before[name] != value
        }
        results.append((lines, cpu.translate(args), changed))
    return results


def flags_and_attributes() -> dict[str, str]:
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {flag: action.dest for action in parser._actions for flag in action.option_strings}


@pytest.fixture(scope="module")
def translated(ranks):
    """What `translate` makes of command lines, each parsed by Megatron."""
    commands = ["", *ON_REQUEST, *REFUSED.values(), "--profile --use-pytorch-profiler"]
    values = ranks.call(translations, commands, world=1).check().values[0]
    return dict(zip(commands, values, strict=True))


def test_defaults_that_need_a_gpu_are_told_and_nothing_else_changes(translated):
    lines, again, changed = translated[""]
    assert [line.removeprefix("CPU backend: ").split(": ")[0] for line in lines] == [*BY_DEFAULT]
    assert changed == dict(BY_DEFAULT.values())
    assert again == []


@pytest.mark.parametrize("command", ON_REQUEST)
def test_a_gpu_only_choice_is_told_and_changed_alone(translated, command):
    lines, again, changed = translated[command]
    told, attribute, value = ON_REQUEST[command]
    own = [line for line in lines if line not in translated[""][0]]
    assert len(own) == 1
    assert command.split()[0] in own[0]
    assert told in own[0]
    assert changed == {**translated[""][2], attribute: value}
    assert again == []


def test_torchs_own_profiler_stays(translated):
    assert translated["--profile --use-pytorch-profiler"] == translated[""]


@pytest.mark.parametrize("flag", REFUSED)
def test_a_choice_without_counterpart_is_refused_by_name(translated, flag):
    message = translated[REFUSED[flag]][0][0]
    assert message.startswith(flag)
    assert "has no CPU counterpart" in message


def test_every_refusal_is_tried_above():
    assert {refusal.flag for refusal in REFUSALS} == REFUSED.keys() - {"--window-size"}


def test_the_table_names_megatrons_own_flags(ranks):
    known = ranks.call(flags_and_attributes, world=1).check().values[0]
    of_other_releases = {"cuda_graph_scope"}  # until 0.17
    for choice in (*TRANSLATIONS, *REFUSALS):
        if attribute_of(choice) not in of_other_releases:
            assert known[choice.flag] == attribute_of(choice)


def test_the_run_says_once_what_it_replaces_and_that_timings_are_not_a_gpus():
    command = tiny_command(iterations=1)
    done = piper_megatron("run", "--cpu", "--nproc", "2", str(SCRIPT), *command)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("CPU backend:")]
    assert len(lines) == len(set(lines))
    assert sum("its timings are not a GPU's" in line for line in lines) == 1
    assert sum("process groups use gloo in place of NCCL" in line for line in lines) == 1
    assert sum("--transformer-impl transformer_engine becomes local" in line for line in lines) == 1
    assert "CPU RNG state changed" not in done.stderr


def enable_and_disable() -> list[str]:
    """Names in torch and Megatron that differ after the backend came and went."""
    import megatron.core.models.hybrid.hybrid_layer_specs  # noqa: F401
    import torch.utils.data

    from piper_megatron.runtime import cpu

    def names() -> dict[str, int]:
        owners = {
            name: vars(module)
            for name, module in sys.modules.items()
            if name.split(".")[0] in ("torch", "megatron") and module is not None
        }
        owners["Tensor"] = dict(vars(torch.Tensor))
        owners["DataLoader"] = dict(vars(torch.utils.data.DataLoader))
        owners["autocast"] = dict(vars(torch.autocast))
        return {
            f"{owner}.{name}": id(value)
            for owner, attributes in owners.items()
            for name, value in attributes.items()
        }

    before, modules = names(), set(sys.modules)
    cpu.enable()
    assert cpu.is_enabled()
    during = names()
    assert sum(during[name] != before[name] for name in before) > 100
    cpu.disable()
    after = names()
    new_in_classes = [
        name
        for name in after.keys() - before.keys()
        if name.startswith(("Tensor.", "DataLoader.", "autocast."))
    ]
    hidden = [name for name in set(sys.modules) - modules if sys.modules[name] is None]
    assert not cpu.is_enabled()
    return [name for name in before if after.get(name) != before[name]] + new_in_classes + hidden


def use_megatron_after_disable() -> list[bool]:
    import megatron.core.tensor_parallel.random as by_name

    from piper_megatron.runtime import cpu

    under_backend = by_name._lazy_call
    cpu.disable()
    return [by_name._lazy_call is not under_backend, by_name._lazy_call is torch.cuda._lazy_call]


def test_disable_leaves_torch_exactly_as_it_was():
    server = RankServer(cpu=False)
    try:
        assert server.call(enable_and_disable, world=1).check().values[0] == []
    finally:
        server.close()


def test_disable_reaches_names_that_megatron_imported(ranks):
    assert ranks.call(use_megatron_after_disable, world=1).check().values[0] == [True, True]


def stand_ins() -> dict[str, bool]:
    cuda = torch.device("cuda")
    tensor = torch.ones(2, 3, device="cuda", pin_memory=True)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        end.record()
    loader = torch.utils.data.DataLoader([1, 2, 3], pin_memory=True)
    state = torch.get_rng_state()
    read = list(loader)
    untouched = torch.equal(state, torch.get_rng_state())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product = tensor @ tensor.T
    return {
        "made at home": tensor.is_cpu and torch.full((1,), 2.0, device=0).is_cpu,
        "moved home": all(t.is_cpu for t in (tensor.cuda(), tensor.to(cuda), tensor.to(1))),
        "moved by keyword": tensor.to(device="cuda:1", dtype=torch.half).dtype is torch.half,
        "modules stay": torch.nn.Linear(2, 2).cuda().to("cuda").weight.is_cpu,
        "type names the device": tensor.type() == "torch.cuda.FloatTensor",
        "type converts": tensor.type("torch.cuda.HalfTensor").dtype is torch.half,
        "classes": isinstance(tensor, torch.cuda.FloatTensor)
        and not isinstance(tensor, torch.cuda.HalfTensor),
        "classes make tensors": torch.cuda.LongTensor([3]).tolist() == [3],
        "never pinned": not tensor.pin_memory().is_pinned(),
        "one device": (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0),
        "no memory": torch.cuda.memory_stats()["allocated_bytes.all.current"] == 0,
        "events": start.elapsed_time(end) >= 0,
        "a loader draws from its own generator": len(read) == 3 and untouched,
        "autocast": product.dtype is torch.bfloat16,
        "hidden kernels": importlib.util.find_spec("transformer_engine") is None,
        "not compiled": torch.compile(stand_ins) is stand_ins,
    }


def test_stand_ins_answer_for_a_gpu(ranks):
    answers = ranks.call(stand_ins, world=1).check().values[0]
    assert [name for name, right in answers.items() if not right] == []


def exchange_uneven_parts() -> tuple[list, list]:
    import torch.distributed as dist

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    sizes = [3, 0, 1]
    parts = [torch.empty(size, 2) for size in sizes]
    dist.all_gather(parts, torch.full((sizes[rank], 2), float(rank)))
    mine = torch.empty(sizes[rank], 2)
    dist.reduce_scatter(mine, [torch.full((size, 2), float(rank + 1)) for size in sizes])
    assert dist.get_backend() == "gloo"
    return [part.tolist() for part in parts], mine.tolist()


def test_parts_of_different_sizes_are_gathered_and_scattered(ranks):
    values = ranks.call(exchange_uneven_parts, world=3).check().values
    for gathered, _ in values:
        assert gathered == [[[0.0, 0.0]] * 3, [], [[2.0, 2.0]]]
    assert [scattered for _, scattered in values] == [[[6.0, 6.0]] * 3, [], [[6.0, 6.0]]]


def empty_what_is_being_sent() -> list[bool]:
    """Whether what arrives is what was sent, though its memory was given away meanwhile."""
    import torch.distributed as dist

    dist.init_process_group("nccl")
    arrived = []
    for batched in (False, True):
        tensor = torch.full((1000,), float(dist.get_rank()))
        if dist.get_rank() == 0:
            if batched:
                (work,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1)])
            else:
                work = dist.isend(tensor, 1)
            tensor.data = torch.empty(1)
            others = [torch.full((1000,), -1.0) for _ in range(20)]
            dist.barrier()
            work.wait()
            del others
        else:
            dist.barrier()
            dist.recv(tensor, 0)
            arrived.append(not tensor.any().item())
    return arrived


def test_a_stage_may_empty_its_output_while_it_is_sent(ranks):
    run = ranks.call(empty_what_is_being_sent, world=2).check()
    assert run.values[1] == [True, True]


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4))
def test_context_parallel_ranks_hold_the_sequence_and_its_mask_between_them(ranks_, chunk_length):
    length = 2 * ranks_ * chunk_length
    tokens = torch.arange(length)
    chunks = tokens.chunk(2 * ranks_)
    held = [torch.cat([chunks[i] for i in chunks_of(rank, ranks_)]) for rank in range(ranks_)]
    assert torch.equal(in_order(torch.cat(held), ranks_), tokens)
    rows = [causal_rows(length, rank, ranks_)[0, 0] for rank in range(ranks_)]
    assert torch.equal(in_order(torch.cat(rows), ranks_), tokens > tokens[:, None])
    assert len({int((~row).sum()) for row in rows}) == 1  # all ranks attend to as many pairs
