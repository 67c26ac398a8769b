"""Bytes of weights, gradients and optimizer states against Megatron's layouts and real ranks."""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from test_parameters import DEEPSEEK_V3, LARGE
from tiny import tiny_command

from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.job import job_of
from piper_megatron.layout.sizes import Sizes
from piper_megatron.resources.buffers import split_layout, whole_layout
from piper_megatron.resources.parameters import Tensor, stage_tensors
from piper_megatron.resources.state_costs import (
    gradient_bytes,
    has_quantized_weights,
    optimizer_cost,
    weight_cost,
)
from piper_megatron.resources.states import stage_states, state_bytes
from piper_megatron.workload.arguments import read_arguments
from piper_megatron.workload.spec import TrainingSpec


@st.composite
def registered(draw):
    """Elements of parameters in the order of registration, and which have a bucket of their own."""
    elements = draw(st.lists(st.integers(1, 700), min_size=1, max_size=12))
    shared = [draw(st.integers(0, 9)) == 0 for _ in elements]
    return elements, shared


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    registered(),
    st.none() | st.integers(1, 1500),
    st.sampled_from([1, 2, 3, 8, 48]),
    st.booleans(),
    st.booleans(),
)
def test_padding_and_shares_are_those_of_megatrons_layouts(
    parameters, bucket, count, high_busbw, whole
):
    elements, shared = parameters
    real = [torch.nn.Parameter(torch.empty(n, device="meta")) for n in elements]
    for parameter, own_bucket in zip(real, shared, strict=True):
        parameter.shared_embedding = own_bucket and not whole
    optimizer = LayerWiseDistributedOptimizer if whole else DistributedOptimizer
    layout = optimizer._compute_per_buffer_param_layout(
        real, bucket, count, argparse.Namespace(pad_buckets_for_high_nccl_busbw=high_busbw)
    )
    expected = np.zeros(count, dtype=int)
    for start, end, place in layout.param_index_map.values():
        bucket_start, bucket_end = layout.bucket_indices[place]
        for element in range(start, end):
            expected[(element - bucket_start) * count // (bucket_end - bucket_start)] += 1
    tensors = [
        Tensor(name=str(n), elements=n, shared=own and not whole)
        for n, own in zip(elements, shared, strict=True)
    ]
    end = np.lcm.reduce([count, 128, 2**16 if high_busbw else 1])
    layout_of = whole_layout if whole else split_layout
    padded, owned = layout_of(tensors[::-1], bucket, count, int(end))
    assert padded == layout.bucket_indices[-1][1]
    assert owned.tolist() == expected.tolist()


def without_einops() -> None:
    """Megatron splits groups of optimizer instances with it; it is in no extra that tests need."""
    from types import SimpleNamespace

    from megatron.core import parallel_state

    def rearrange(ranks: np.ndarray, pattern: str, **sizes: int) -> np.ndarray:
        assert pattern == "(l s u) -> (l u) s"
        last, size, step = (sizes[name] for name in "lsu")
        return ranks.reshape(last, size, step).transpose(0, 2, 1).reshape(last * step, size)

    parallel_state.HAVE_EINOPS = True
    parallel_state.einops = SimpleNamespace(rearrange=rearrange)


def real_states(argv: list[str]) -> dict[str, int]:
    """Bytes that this rank holds after one step of the optimizer that Megatron builds."""
    import torch.distributed as dist
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.training import get_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.initialize import initialize_megatron
    from megatron.training.training import get_megatron_optimizer_config, get_model

    import piper_megatron

    without_einops()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    import pretrain_moe

    sys.argv = ["job", *argv]
    piper_megatron.register()
    parse_and_validate_args()
    initialize_megatron(get_embedding_ranks=pretrain_moe.get_embedding_ranks)
    chunks = get_model(pretrain_moe.model_provider, ModelType.encoder_or_decoder)
    config, overrides = get_megatron_optimizer_config(get_args())
    optimizer = get_megatron_optimizer(config, chunks, config_overrides=overrides)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.step()
    for module in (module for chunk in chunks for module in chunk.modules()):
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()  # as its first forward pass does

    counted: set[int] = set()

    def fresh_bytes(tensors: Any) -> int:
        """Bytes of those storages that were not counted before."""
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    buffers = [b for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    found = {
        "gradients": fresh_bytes(buffer.grad_data for buffer in buffers),
        "weights": fresh_bytes(parameter for c in chunks for parameter in c.parameters()),
        "router": fresh_bytes(
            buffer for c in chunks for name, buffer in c.named_buffers() if "router" in name
        ),
    }
    inner = [each.optimizer for each in getattr(optimizer, "chained_optimizers", [optimizer])]
    mains = [p for o in inner if o for group in o.param_groups for p in group["params"]]
    states = [
        value
        for o in inner
        if o
        for state in o.state.values()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name != "step"
    ]
    found["optimizer"] = fresh_bytes(mains) + fresh_bytes(states)
    found["step"] = fresh_bytes(main.grad for main in mains if main.grad is not None)
    found["rank"] = dist.get_rank()
    return found


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, "--bf16"),
        (2, ""),
        (2, "--fp16 --optimizer sgd --grad-reduce-in-bf16 --expert-model-parallel-size 2"),
        (
            4,
            "--bf16 --use-distributed-optimizer --expert-model-parallel-size 2 "
            "--moe-router-enable-expert-bias --moe-router-score-function sigmoid",
        ),
        (
            4,
            "--bf16 --use-distributed-optimizer --pipeline-model-parallel-size 2 "
            "--grad-reduce-in-bf16 --overlap-grad-reduce --ddp-bucket-size 3000 "
            "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2",
        ),
        (
            4,
            "--use-distributed-optimizer --ddp-num-buckets 5 --overlap-grad-reduce "
            "--sequence-parallel --tensor-model-parallel-size 2 --expert-model-parallel-size 2 "
            "--expert-tensor-parallel-size 1",
        ),
        (
            4,
            "--bf16 --use-distributed-optimizer --num-distributed-optimizer-instances 2 "
            "--ddp-pad-buckets-for-high-nccl-busbw --expert-model-parallel-size 2",
        ),
        (
            4,
            "--bf16 --use-distributed-optimizer --pipeline-model-parallel-size 2 "
            "--pipeline-model-parallel-layout Et|tt|t|mL --mtp-num-layers 1 --overlap-grad-reduce "
            "--ddp-num-buckets 3 --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 24 "
            "--qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm",
        ),
    ],
    ids=["bf16", "fp32", "sgd", "experts", "buckets", "tensors", "instances", "chunks"],
)
def test_bytes_of_real_ranks(ranks, world, flags):
    argv = tiny_command("--transformer-impl", "local", *flags.split())
    run = ranks.call(real_states, argv, world=world).check()
    job = job_of(read_arguments(argv).values, world)
    per_stage = world // job.layout.pp
    for stage, states in enumerate(stage_states(job)):
        held = [value for value in run.values if value["rank"] // per_stage == stage]
        assert {value["weights"] for value in held} == {states.weights_bytes}
        assert {value["gradients"] for value in held} == {states.gradients_bytes}
        assert {value["router"] for value in held} == {states.router_bytes}
        assert max(value["optimizer"] for value in held) == states.optimizer_bytes
        assert max(value["optimizer"] + value["step"] for value in held) == (
            states.optimizer_bytes + states.step_peak_bytes
        )


def bytes_per_parameter(matrix: bool = True, low: bool = False, **training: Any) -> tuple:
    """(weight, 8-bit copies, gradient, optimizer, while stepping) of one element alone."""
    spec = TrainingSpec(**{"precision": "bf16", "use_distributed_optimizer": True, **training})
    weight = weight_cost(spec, low_precision=low, transposed=True)
    optimizer = optimizer_cost(spec, matrix=matrix, quantized=low and has_quantized_weights(spec))
    gradient = gradient_bytes(spec)
    return weight.weight, weight.low_precision, gradient, optimizer.resident, optimizer.step


BF16_EVERYWHERE = {
    "use_precision_aware_optimizer": True,
    "grad_reduce_in_fp32": False,
    "main_grads_dtype": "bf16",
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}
MUON = {
    "optimizer": "muon",
    "use_distributed_optimizer": False,
    "use_layer_wise_distributed_optimizer": True,
}
FP8 = {"fp8": "e4m3", "low": True}


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({}, (2, 0, 4, 12, 0)),
        ({"precision": "fp32"}, (4, 0, 4, 8, 0)),
        ({"grad_reduce_in_fp32": False}, (2, 0, 2, 12, 4)),
        ({"use_precision_aware_optimizer": True}, (2, 0, 4, 2 + 8, 0)),
        (BF16_EVERYWHERE, (2, 0, 2, 2 + 4, 8)),
        ({**BF16_EVERYWHERE, "precision": "fp16"}, (2, 0, 2, 4 + 4, 8)),
        ({**BF16_EVERYWHERE, "main_params_dtype": "fp16"}, (2, 0, 2, 2 + 4, 12)),
        ({**BF16_EVERYWHERE, "exp_avg_dtype": "fp8"}, (2, 0, 2, 2 + 3, 8)),
        ({**BF16_EVERYWHERE, **FP8, "fp8_recipe": "mxfp8"}, (2, 66 / 32, 2, 4 + 4, 12)),
        ({**FP8, "fp8_recipe": "tensorwise"}, (2, 2, 4, 12, 0)),
        ({**FP8, "fp8_recipe": "tensorwise", "fp8_param_gather": True}, (1, 1, 4, 12, 0)),
        ({**FP8, "fp8_recipe": "mxfp8", "fp8_param_gather": True}, (0, 66 / 32, 4, 12, 0)),
        ({"fp4": True, "low": True}, (2, 1.125, 4, 12, 0)),
        (MUON, (2, 0, 4, 8, 0)),
        ({**MUON, "matrix": False}, (2, 0, 4, 12, 0)),
        ({"optimizer": "sgd", "use_distributed_optimizer": False}, (2, 0, 4, 8, 0)),
        (
            {
                "use_precision_aware_optimizer": True,
                "optimizer_cpu_offload": True,
                "optimizer_offload_fraction": 0.75,
            },
            (2, 0, 4, 3, 0),
        ),
    ],
)
def test_bytes_of_one_parameter(training, expected):
    assert bytes_per_parameter(**training) == pytest.approx(expected)


@pytest.mark.parametrize("case", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("training", [{"optimizer": "adam"}, MUON, {"fp8": "e4m3"}], ids=str)
def test_the_closed_form_is_the_exact_one_without_padding(case, training):
    job = case.job(
        transformer_impl="transformer_engine",
        moe_grouped_gemm=True,
        **{"use_distributed_optimizer": True, "overlap_grad_reduce": True, **training},
    )
    model = job.model
    for chunks, exact in zip(job.pipeline.stages, stage_states(job), strict=True):
        layers = [model.moe_layers[layer] for chunk in chunks for layer in chunk.layers]
        tensors = stage_tensors(
            model,
            job.training,
            job.sizes,
            dense_layers=layers.count(False),
            moe_layers=layers.count(True),
            embedding=int(any(chunk.embedding for chunk in chunks)),
            mtp=int(any(chunk.mtp_layers for chunk in chunks)),
            loss=int(any(chunk.loss for chunk in chunks)),
        )
        closed = state_bytes(model, job.training, job.sizes, tensors)
        if "muon" in training.values():
            # how full the shares are depends on each chunk's matrices
            assert 0.9 * exact.resident_bytes < closed.resident_bytes < 2 * exact.resident_bytes
            continue
        for name in ("weights", "gradients", "low_precision", "optimizer", "resident"):
            part = f"{name}_bytes"
            assert getattr(closed, part) == pytest.approx(getattr(exact, part), rel=0.002)


def test_many_layouts_at_once():
    model, training = DEEPSEEK_V3, TrainingSpec(precision="bf16", use_distributed_optimizer=True)
    layouts = [ParallelLayout(world=512, pp=8, ep=e, tp=t, etp=1) for e, t in ((8, 1), (64, 4))]
    axes = ("world", "tp", "cp", "pp", "ep", "etp")

    def states(sizes: Sizes) -> Any:
        tensors = stage_tensors(
            model, training, sizes, dense_layers=0, moe_layers=8, embedding=0, mtp=0, loss=0
        )
        return state_bytes(model, training, sizes, tensors)

    batch = {"vpp": 1, "micro_batch": 1, "global_batch": 512, "seq": 4096}
    many = {axis: np.array([getattr(layout, axis) for layout in layouts]) for axis in axes}
    together = states(Sizes(**many, **batch))
    for place, layout in enumerate(layouts):
        alone = states(Sizes(**{axis: getattr(layout, axis) for axis in axes}, **batch))
        for part in ("weights_bytes", "gradients_bytes", "optimizer_bytes", "resident_bytes"):
            assert getattr(together, part)[place] == pytest.approx(getattr(alone, part))


def test_fully_sharded_states_are_divided_by_the_strategy():
    case = LARGE["Qwen3-235B on 256"]
    plain = stage_states(case.job(use_distributed_optimizer=True))[0]
    states = {
        strategy: stage_states(
            case.job(
                use_distributed_optimizer=True,
                fsdp="megatron",
                data_parallel_sharding_strategy=strategy,
            )
        )[0]
        for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")
    }
    assert states["no_shard"].optimizer_bytes == pytest.approx(6 * states["no_shard"].weights_bytes)
    assert states["optim"].optimizer_bytes == pytest.approx(plain.optimizer_bytes, rel=0.01)
    assert states["optim"].gradients_bytes == pytest.approx(plain.gradients_bytes / 2, rel=0.01)
    assert states["optim_grads"].gradients_bytes < states["optim"].gradients_bytes / 3
    assert states["optim_grads"].gathered_bytes > 0
    assert states["optim_grads_params"].weights_bytes < states["optim_grads"].weights_bytes / 3


def test_building_needs_parameters_twice():
    case = LARGE["Qwen3-235B on 256"]
    sharded = stage_states(case.job(use_distributed_optimizer=True))[3]
    plain = stage_states(case.job())[3]
    # DP x CP is 8, EDP 4: half a byte of optimizer for each of a weight's two would hide the copy
    assert 0 < sharded.load_peak_bytes + sharded.optimizer_bytes < 2 * sharded.weights_bytes
    assert plain.load_peak_bytes == 0
    assert plain.optimizer_bytes == 6 * plain.weights_bytes
