"""Random training commands, about half of them legal: a legal one, then up to four mutations."""

import random
from collections.abc import Callable, Iterator
from functools import cache

from piper_megatron.workload.flags import options

Flags = dict[str, list[str]]

MODULES = (
    "core_attn moe_act layernorm mla_up_proj mlp moe shared_experts gdn_norm_out nothing".split()
)
OFFLOADS = "core_attn attn_proj expert_fc1 moe_act attn_norm mlp_norm qkv_linear nothing".split()
GRAPHED = "attn mlp moe moe_router moe_preprocess full_iteration full".split()
LAYOUTS = (
    "Et|(tt|)*29L|",
    "Ett|tt|ttL",
    "E|t*4|t*4|L",
    "Et*2|(tt|)*5t|tmL",
    "E,(t)*13|(t)*14,L",
    "ttt|ttt|L",
    "Et|t|t|tx",
    "Ettt|tttL|m",
    "Etm|t|t|tL",
    "tE|t|tL|",
)
# flags without a value that make a legal command legal or illegal depending on the rest
SWITCHES = """
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --overlap-param-gather-with-optimizer-step --use-precision-aware-optimizer
    --optimizer-cpu-offload --fp8-param-gather --fp4-param-gather --first-last-layers-bf16
    --accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16 --fp32-residual-connection
    --fp16 --bf16 --fp16-lm-cross-entropy --use-torch-fsdp2 --use-megatron-fsdp
    --untie-embeddings-and-output-weights --no-gradient-accumulation-fusion
    --disable-gloo-process-groups --use-tp-pp-dp-mapping --tp-comm-overlap --delay-wgrad-compute
    --overlap-moe-expert-parallel-comm --overlap-dispatch-backward-with-experts-wgrad
    --ep-overlap-early-attn-memory-release --defer-embedding-wgrad-compute
    --overlap-p2p-communication-warmup-flush --no-overlap-p2p-communication
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
    --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --moe-shared-expert-overlap
    --moe-shared-expert-gate --moe-enable-deepep --moe-pad-expert-input-to-capacity
    --moe-router-pre-softmax --moe-router-enable-expert-bias --moe-layer-recompute
    --moe-router-padding-for-quantization --moe-router-padding-for-fp8 --moe-paged-stash
    --moe-single-grouped-weight --moe-single-grouped-bias --use-transformer-engine-op-fuser
    --recompute-activations --distribute-saved-activations --fine-grained-activation-offloading
    --cross-entropy-loss-fusion --deterministic-mode --multi-latent-attention --qk-layernorm
    --group-query-attention --disable-bias-linear --add-qkv-bias --attention-output-gate
    --no-rope-fusion --rotary-interleaved --use-rotary-position-embeddings --swiglu
    --squared-relu --quick-geglu --no-bias-gelu-fusion --no-bias-swiglu-fusion
    --use-te-activation-func --fake-process-group --decrease-batch-size-if-needed
    --hybrid-context-parallel --calculate-per-token-loss --mla-down-proj-fusion
    --batch-invariant-mode --fp8-output-proj --reuse-grad-buf-for-mxfp8-param-ag
    --ddp-average-in-collective --dist-ckpt-optim-fully-reshardable
    --distrib-optim-fully-reshardable-mem-efficient --no-check-for-nan-in-loss-and-grad
    --enable-cuda-graph --external-cuda-graph --fused-residual-rmsnorm --use-sharp
    --cache-mla-latents --skip-train --mtp-use-repeated-layer
""".split()
VALUES: dict[str, list[str]] = {
    "--tensor-model-parallel-size": "1 2 3 4 8".split(),
    "--pipeline-model-parallel-size": "1 2 3 4 8".split(),
    "--context-parallel-size": "1 2 3 4".split(),
    "--expert-model-parallel-size": "1 2 3 4 8 16 32".split(),
    "--expert-tensor-parallel-size": "1 2 4".split(),
    "--num-distributed-optimizer-instances": "1 2 3 4".split(),
    "--tensor-parallel-num-weight-shards": "1 2 4 8".split(),
    "--expert-tensor-parallel-num-weight-shards": "1 2 4".split(),
    "--num-layers": "4 8 12 13 16 24 27 30 61".split(),
    "--num-attention-heads": "4 8 12 16 32".split(),
    "--num-query-groups": "1 2 3 4 8".split(),
    "--hidden-size": "64 96 100 128".split(),
    "--kv-channels": "16 32".split(),
    "--seq-length": "128 130 132 256".split(),
    "--max-position-embeddings": "64 256".split(),
    "--micro-batch-size": "1 2 3".split(),
    "--global-batch-size": "1 8 16 24 30 64".split(),
    "--eval-global-batch-size": "8 12 16".split(),
    "--eval-micro-batch-size": "1 2".split(),
    "--step-batch-size-schedule": ["0:16 1M:32", "1M:32", "0:16,0:32", "16"],
    "--num-virtual-stages-per-pipeline-rank": "1 2 3 4".split(),
    "--num-layers-per-virtual-pipeline-stage": "1 2 3 4".split(),
    "--decoder-first-pipeline-num-layers": "0 1 2 3 4 6".split(),
    "--decoder-last-pipeline-num-layers": "0 1 2 3 4 6".split(),
    "--pipeline-model-parallel-layout": list(LAYOUTS),
    "--mtp-num-layers": "0 1 2".split(),
    "--num-experts": "0 4 6 8 16 64".split(),
    "--moe-ffn-hidden-size": "64 128".split(),
    "--moe-router-topk": "1 2 4".split(),
    "--moe-router-score-function": "softmax sigmoid sqrtsoftplus".split(),
    "--moe-router-num-groups": "2 3 4".split(),
    "--moe-router-group-topk": "1 2 4 8".split(),
    "--moe-router-load-balancing-type": "aux_loss seq_aux_loss sinkhorn none".split(),
    "--moe-token-dispatcher-type": "allgather alltoall flex".split(),
    "--moe-flex-dispatcher-backend": "deepep hybridep ncclep".split(),
    "--moe-expert-capacity-factor": "-1 0.5 1.0".split(),
    "--moe-expert-rank-capacity-factor": "1.5".split(),
    "--moe-shared-expert-intermediate-size": "0 64 128".split(),
    "--moe-latent-size": "0 32".split(),
    "--moe-layer-freq": ["1", "2", "([0]*2+[1]*2)"],
    "--moe-router-dtype": "fp32".split(),
    "--recompute-granularity": "full selective".split(),
    "--recompute-method": "uniform block".split(),
    "--recompute-num-layers": "1 2".split(),
    "--cpu-offloading-num-layers": "0 1 100".split(),
    "--fp8-format": "e4m3 hybrid".split(),
    "--fp8-recipe": "tensorwise delayed mxfp8 blockwise custom".split(),
    "--fp4-format": "e2m1".split(),
    "--num-layers-at-start-in-bf16": "0 1 5".split(),
    "--main-grads-dtype": "fp32 bf16".split(),
    "--exp-avg-dtype": "fp32 bf16".split(),
    "--optimizer": "adam sgd muon dist_muon".split(),
    "--ckpt-format": "torch torch_dist torch_dcp fsdp_dtensor".split(),
    "--data-parallel-sharding-strategy": "no_shard optim_grads_params".split(),
    "--cuda-graph-impl": "none local transformer_engine full_iteration".split(),
    "--inference-cuda-graph-scope": "none layer block".split(),
    "--transformer-impl": "local transformer_engine".split(),
    "--attention-backend": "auto flash fused local".split(),
    "--position-embedding-type": "learned_absolute rope yarn relative none".split(),
    "--rope-type": "rope yarn".split(),
    "--no-rope-freq": ["3", "4", "([0]*3+[1])"],
    "--cross-entropy-fusion-impl": "native te".split(),
    "--sharp-enabled-group": "dp dp_replica".split(),
    "--normalization": "LayerNorm RMSNorm".split(),
    "--glu-linear-offset": "0 1".split(),
    "--attention-dropout": "0 0.1".split(),
    "--hidden-dropout": "0 0.1".split(),
    "--flash-attention-version": "2 3".split(),
    "--lr-warmup-fraction": "0.1".split(),
    "--lr-decay-iters": "5".split(),
    "--train-samples": "100".split(),
    "--min-lr": "0 1".split(),
    "--weight-decay-incr-style": "constant linear".split(),
    "--microbatch-group-size-per-virtual-pipeline-stage": "2 4".split(),
}
LISTS: dict[str, list[str]] = {
    "--recompute-modules": MODULES,
    "--offload-modules": OFFLOADS,
    "--cuda-graph-modules": GRAPHED,
    "--hierarchical-context-parallel-sizes": ["1", "2", "4"],
    "--moe-aux-loss-coeff": ["0", "0.01"],
    "--cp-comm-type": ["p2p", "a2a", "allgather", "a2a+p2p"],
}
# flags that mostly go together; one mutation takes all of a row
COMBINATIONS = """
    --recompute-granularity=full --recompute-method=uniform --recompute-num-layers=1
    --recompute-granularity=selective --recompute-modules=moe_act
    --recompute-granularity=selective --recompute-modules=mla_up_proj
    --fine-grained-activation-offloading --offload-modules=expert_fc1
    --fine-grained-activation-offloading --offload-modules=attn_proj
    --use-megatron-fsdp --ckpt-format=fsdp_dtensor
    --optimizer-cpu-offload --use-precision-aware-optimizer --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather --use-distributed-optimizer
    --fp8-format=hybrid --fp8-recipe=blockwise --fp8-param-gather
    --fp8-format=e4m3 --fp8-recipe=mxfp8 --first-last-layers-bf16
    --moe-token-dispatcher-type=flex --moe-flex-dispatcher-backend=hybridep
    --moe-token-dispatcher-type=flex --moe-enable-deepep
    --moe-router-enable-expert-bias --moe-router-score-function=sigmoid
    --moe-router-num-groups=4 --moe-router-group-topk=2
    --moe-expert-capacity-factor=1.0 --moe-pad-expert-input-to-capacity
    --multi-latent-attention --rope-type=rope
    --cuda-graph-impl=transformer_engine --cuda-graph-modules=attn
    --cuda-graph-impl=local --cuda-graph-modules=moe_router
    --optimizer=muon --use-distributed-optimizer
    --overlap-moe-expert-parallel-comm --delay-wgrad-compute
    --position-embedding-type=rope --mtp-num-layers=1
    --group-query-attention --num-query-groups=2
    --moe-shared-expert-intermediate-size=64 --moe-shared-expert-overlap
"""


def random_command(rng: random.Random) -> tuple[list[str], int]:
    """Arguments and the number of GPUs."""
    flags, world = _legal(rng)
    for mutate in rng.choices(
        _MUTATIONS, weights=(4, 3, 2, 2, 1), k=rng.choice((0, 0, 1, 1, 2, 3, 4))
    ):
        world = mutate(rng, flags, world)
    return list(_tokens(flags)), world


def _legal(rng: random.Random) -> tuple[Flags, int]:
    tp, cp, dp = rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 1, 2)), rng.choice((1, 2, 4))
    pp = rng.choice((1, 2, 2, 4))
    vpp = rng.choice((1, 1, 2)) if pp > 1 else 1
    world = tp * cp * dp * pp
    layers = pp * vpp * rng.choice((1, 2, 3))
    micro = rng.choice((1, 2))
    flags: Flags = {
        "--num-layers": [str(layers)],
        "--hidden-size": ["64"],
        "--num-attention-heads": ["8"],
        "--seq-length": ["128"],
        "--max-position-embeddings": ["128"],
        "--micro-batch-size": [str(micro)],
        "--global-batch-size": [str(micro * dp * pp * rng.choice((1, 2, 3)))],
        "--tensor-model-parallel-size": [str(tp)],
        "--pipeline-model-parallel-size": [str(pp)],
        "--context-parallel-size": [str(cp)],
        "--disable-bias-linear": [],
        "--swiglu": [],
        "--untie-embeddings-and-output-weights": [],
        "--position-embedding-type": ["rope"],
        "--bf16": [],
        "--lr": ["1e-4"],
        "--train-iters": ["10"],
    }
    if vpp > 1:
        _split_virtually(rng, flags, layers, pp, vpp)
    if rng.random() < 0.75:
        _add_experts(rng, flags, tp, world // pp)
    if tp > 1 and rng.random() < 0.8:
        flags["--sequence-parallel"] = []
    return flags, world


def _split_virtually(rng: random.Random, flags: Flags, layers: int, pp: int, vpp: int) -> None:
    each = layers // (pp * vpp)
    flags |= rng.choice(
        (
            {"--num-virtual-stages-per-pipeline-rank": [str(vpp)]},
            {"--num-layers-per-virtual-pipeline-stage": [str(each)]},
            {
                "--pipeline-model-parallel-layout": [
                    f"E{'t' * each}|({'t' * each}|)*{pp * vpp - 2}{'t' * each}L"
                ]
            },
        )
    )


def _add_experts(rng: random.Random, flags: Flags, tp: int, ranks: int) -> None:
    etp = rng.choice([size for size in (1, 1, 2, tp) if ranks % size == 0])
    ep = rng.choice([size for size in (1, 2, 4, 8, 16) if ranks % (size * etp) == 0])
    flags |= {
        "--num-experts": [str(ep * rng.choice((2, 4)))],
        "--moe-ffn-hidden-size": ["64"],
        "--moe-router-topk": ["2"],
        "--moe-grouped-gemm": [],
        "--expert-model-parallel-size": [str(ep)],
        "--expert-tensor-parallel-size": [str(etp)],
        "--moe-token-dispatcher-type": [rng.choice(("alltoall", "alltoall", "flex", "allgather"))],
        "--moe-router-load-balancing-type": ["aux_loss"],
        "--moe-aux-loss-coeff": ["0.01"],
    }


def _change_value(rng: random.Random, flags: Flags, world: int) -> int:
    flag = rng.choice(list(VALUES))
    flags[flag] = [rng.choice(VALUES[flag])]
    return world


def _toggle(rng: random.Random, flags: Flags, world: int) -> int:
    flag = rng.choice(SWITCHES)
    if flag in flags:
        del flags[flag]
    else:
        flags[flag] = []
    return world


def _combine(rng: random.Random, flags: Flags, world: int) -> int:
    for flag in rng.choice(COMBINATIONS.strip().splitlines()).split():
        name, _, value = flag.partition("=")
        flags[name] = [value] if value else []
    return world


def _change_list(rng: random.Random, flags: Flags, world: int) -> int:
    flag = rng.choice(list(LISTS))
    flags[flag] = rng.choices(LISTS[flag], k=rng.choice((1, 1, 2)))
    return world


def _change_world(rng: random.Random, flags: Flags, world: int) -> int:
    return max(1, rng.choice((world * 2, world // 2, world * 3, world + 1, 24)))


_MUTATIONS: tuple[Callable[[random.Random, Flags, int], int], ...] = (
    _change_value,
    _toggle,
    _combine,
    _change_list,
    _change_world,
)


def _tokens(flags: Flags) -> Iterator[str]:
    for flag, values in flags.items():
        yield flag
        yield from values


# values of options that take any text of their type; files and addresses are left out
_TEXTS = {
    "--pipeline-model-parallel-layout": [*LAYOUTS, "E|L", "Ett(t*2", "Et|tL", "E(tt|)*3ttL", ""],
    "--hybrid-layer-pattern": ["M*M-", "MM|MM", "M*|*E/MM/MM", "Mx", "M*+", "MD", "M-/M/MM", ""],
    "--hybrid-override-pattern": ["M*M-", "M|M"],
    "--mtp-hybrid-override-pattern": ["MM", "*", "x"],
    "--step-batch-size-schedule": ["0:16 1M:32", "1M:32", "0:16,0:32", "16", "0:0", "", "0:x"],
    "--recompute-modules": MODULES,
    "--offload-modules": [*OFFLOADS, "fused_group_mlp"],
    "--cuda-graph-modules": [*GRAPHED, "full_iteration_inference", "mamba", "bogus"],
    "--cuda-graph-scope": GRAPHED,
    "--cp-comm-type": ["p2p", "a2a", "allgather", "a2a+p2p", "all_gather"],
}
_TYPED = {
    "int": "-1 0 1 2 3 4 7 8 16 64 128".split(),
    "float": "-1 0 0.5 1 2".split(),
    "pattern": ["0", "1", "2", "3", "([0]*2+[1]*2)", "([1]*4)", "[1", "x"],
    "tuple": ["1,2", "128"],
    "str": ["x"],
    "bool": ["True"],
}
_NEEDS_A_FILE = {
    "--nccl-communicator-config-path",
    "--yaml-cfg",
    "--enable-msc",
    "--heterogeneous-layers-config-path",
    "--heterogeneous-layers-config-encoded-json",
    "--te-precision-config-file",
    "--result-rejected-tracker-filename",
    "--use-checkpoint-args",
    "--config-logger-dir",
}


def any_command(rng: random.Random) -> tuple[list[str], int]:
    """A legal command with up to four of all of Megatron's options, and the number of GPUs."""
    flags, world = _legal(rng)
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        spelling = rng.choice(_spellings())
        flags[spelling] = _values(rng, spelling)
    if rng.random() < 0.3:
        _combine(rng, flags, world)
    return list(_tokens(flags)), world


@cache
def _spellings() -> list[str]:
    return sorted(set(options()) - _NEEDS_A_FILE)


def _values(rng: random.Random, spelling: str) -> list[str]:
    option = options()[spelling]
    if option.kind != "store":
        return []
    some = _TEXTS.get(spelling) or list(map(str, option.choices or _TYPED[option.type]))
    if option.nargs is None:
        return [rng.choice(some)]
    count = option.nargs if isinstance(option.nargs, int) else rng.choice((1, 1, 2))
    return rng.choices(some, k=count)
