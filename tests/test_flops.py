"""FLOP counts against Megatron's own, over all published runs."""

import json
import os
import re
import sys
from argparse import Namespace
from importlib import resources
from unittest import mock

import pytest
from megatron_judge import ENVIRONMENT, gpu_job

from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.job import Job, job_of
from piper_megatron.layout.pipeline import pipeline_layout
from piper_megatron.platform.platform import load_platform
from piper_megatron.resources.flops import flops_utilisation, step_flops
from piper_megatron.workload.arguments import read_arguments
from piper_megatron.workload.spec import Attention, BatchSpec, Experts, ModelSpec, TrainingSpec

TABLE = resources.files("piper_megatron.validation") / "measured_runs.jsonl"
RUNS = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]


def world_of(run: dict) -> int:
    inferred = re.search(r"inferred=(\d+)", run.get("gpus_note") or "")
    if run["gpus"]:
        return run["gpus"]
    if inferred:
        return int(inferred[1])
    sizes = read_arguments(run["megatron_args"]).values
    return 64 * sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size


def megatron_arguments(tokens: list[str], world: int) -> Namespace:
    """As Megatron parses and completes them, with the vocabulary that its tokenizer would have."""
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
    from megatron.training import arguments

    environment = {**ENVIRONMENT, "WORLD_SIZE": str(world), "RANK": "0"}
    if "--use-megatron-fsdp" in tokens:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
        tokens = [*tokens, "--ckpt-format", "fsdp_dtensor"]
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", ["pretrain.py", *tokens]),
    ):
        args = arguments.parse_args()
        arguments.validate_args(args)
    args.padded_vocab_size = vocab_size_with_padding(args.vocab_size, args, logging_enabled=False)
    return args


def test_megatrons_convention_on_every_published_run():
    from megatron.training.training import num_floating_point_operations

    different = []
    with gpu_job():
        for run in RUNS:
            # 0.19.2 refuses the fused loss `te`, which does not change the count
            tokens = ["native" if token == "te" else token for token in run["megatron_args"]]
            world = world_of(run)
            args = megatron_arguments(tokens, world)
            theirs = num_floating_point_operations(args, args.global_batch_size)
            ours = step_flops(job_of(read_arguments(tokens).values, world))
            if ours != pytest.approx(theirs, rel=1e-12):
                different.append(f"{run['id']}: {ours:.6e}, Megatron counts {theirs:.6e}")
    assert not different


@pytest.mark.parametrize(
    "more",
    [
        "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 96 --moe-latent-size 32",
        "--num-experts 8 --moe-layer-freq 2 --moe-shared-expert-intermediate-size 48 --swiglu",
        "--attention-output-gate --group-query-attention --num-query-groups 2",
        "--num-experts 4 --mtp-num-layers 2 --untie-embeddings-and-output-weights",
        "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 24 --v-head-dim 20",
    ],
)
def test_megatrons_convention_on_other_models(more):
    from megatron.training.training import num_floating_point_operations

    tokens = f"""
        --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128
        --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 6 --vocab-size 1000
        --position-embedding-type rope {more}
    """.split()
    with gpu_job():
        args = megatron_arguments(tokens, 1)
        theirs = num_floating_point_operations(args, 6)
    ours = step_flops(job_of(read_arguments(tokens).values, 1))
    assert ours == pytest.approx(theirs, rel=1e-12)


def xmoe_job(hidden: int, ffn: int, experts: int, topk: int, layers: int, seq: int) -> Job:
    heads = 16
    model = ModelSpec(
        hidden=hidden,
        ffn=ffn,
        gated=False,
        attention=Attention(heads=heads, groups=heads, head_dim=hidden // heads),
        moe_layers=(True,) * layers,
        experts=Experts(count=experts, topk=topk, ffn=ffn),
        vocab=50304,
        max_positions=seq,
    )
    return Job(
        model=model,
        batch=BatchSpec(seq=seq, micro_batch=1, global_batch=64),
        training=TrainingSpec(),
        layout=ParallelLayout(world=8, tp=1, cp=1, pp=1, ep=8, etp=1),
        pipeline=pipeline_layout(layers, 1),
    )


def test_the_convention_of_xmoe_counts_the_whole_square_of_attention():
    job = xmoe_job(hidden=2048, ffn=1408, experts=64, topk=6, layers=28, seq=2048)
    h, f, k, s, b, v = 2048, 1408, 6, 2048, 64, 50304
    layer = 4 * h * h * s + 2 * s * s * h + 2 * f * h * k * s
    assert step_flops(job, "xmoe") == pytest.approx(6 * (b * 28 * layer + b * v * h * s))
    causal_half = 6 * b * 28 * s * s * h
    difference = step_flops(job, "xmoe") - step_flops(job)
    assert difference == pytest.approx(causal_half)


@pytest.mark.parametrize(
    ("tflops", "percent", "tolerance"),
    [
        (102.8, 53.8, 0.2),
        (55.4, 29.0, 0.2),
        (74.2, 38.8, 0.2),
        (37.8, 19.8, 0.2),
        (46.8, 24.5, 0.2),
        (33.04, 17.3, 0.1),
        (10.2, 5.33, 0.005),
        (10.44e3 / 1024, 5.32, 0.005),
    ],
)
def test_acceptance_10_utilisation_of_a_frontier_die(tflops, percent, tolerance):
    peak = load_platform("frontier").need_accelerator().peak_flops("fp16")
    found = 100 * flops_utilisation(tflops * 1e12, 1.0, peak)
    assert found == pytest.approx(percent, abs=tolerance)
