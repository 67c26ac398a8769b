"""Sizes and layouts that are legal and slow, risky, or other than they look."""

from piper_megatron.check.command import Command
from piper_megatron.check.near import next_multiple
from piper_megatron.check.rule import Problem, rule
from piper_megatron.check.rules.pipeline import layout_advice, layout_of


@rule("effective.sizes", source="megatron/core/parallel_state.py:823, 881", severity="info")
def sizes_as_megatron_uses_them(c: Command) -> Problem | None:
    """The sizes that follow from those that were typed."""
    if not c.dp or not c.edp:
        return None
    parts = [f"{c.gpus} GPUs = TP {c.tp} x CP {c.cp} x PP {c.pp} x DP {c.dp * c.gtp}"]
    if c.experts:
        default = " (default: TP)" if c.expert_tensor_parallel_size is None and c.tp > 1 else ""
        parts.append(
            f"experts: ETP {c.etp}{default} x EP {c.ep} x PP {c.pp} x expert DP {c.edp * c.egtp}"
        )
        if c.ep > c.dp * c.cp:
            parts.append(f"EP {c.ep} folds over TP x CP x DP, which is legal")
    if c.vpp:
        parts.append(f"{c.vpp} virtual stages on each pipeline rank")
    if c.micro_batches:
        parts.append(f"{c.micro_batches} micro-batches a step")
    if c.values.sequence_parallel and c.tp == 1:
        parts.append("sequence parallelism is off, since TP is 1")
    return Problem("; ".join(parts), "")


@rule("layout.lone-prediction", source="modelscope/ms-swift#9827", severity="warning")
def prediction_layers_have_a_decoder_layer_beside_them(c: Command) -> Problem | None:
    """A stage with only multi-token prediction needs a model that supports it."""
    layout = layout_of(c) if c.layout_stages and c.hybrid_pattern is None else None
    if layout is None:
        return None
    lone = [
        chunk
        for stage in layout.stages
        for chunk in stage
        if chunk.mtp_layers and chunk.loss and not chunk.layers
    ]
    if not lone:
        return None
    return Problem(
        "the last stage of the layout holds the multi-token-prediction (MTP) layer and the loss "
        "without a decoder layer; several model codes fail there",
        f"keep a decoder layer in that stage: {layout_advice(c, c.vpp or 1)}",
    )


@rule(
    "pipeline.lopsided", source="the slowest stage sets the pace of a pipeline", severity="warning"
)
def stages_are_about_equal(c: Command) -> Problem | None:
    """One stage with many more layers than the others makes all wait."""
    layout = layout_of(c) if c.pp > 1 and c.hybrid_pattern is None else None
    if layout is None:
        return None
    layers = [sum(len(chunk.layers) for chunk in stage) for stage in layout.stages]
    most, mean = max(layers), sum(layers) / len(layers)
    if most <= 1.5 * mean or most - mean < 2:
        return None
    return Problem(
        f"pipeline rank {layers.index(most)} has {most} of {c.layers} layers, the mean is "
        f"{mean:.1f}: the others wait for it about {1 - mean / most:.0%} of the time",
        layout_advice(c, c.vpp or 1),
    )


@rule(
    "pipeline.bubble",
    source="bubble = (PP - 1) / (micro-batches x VPP + PP - 1)",
    severity="warning",
)
def micro_batches_fill_the_pipeline(c: Command) -> Problem | None:
    """Fewer micro-batches than stages leave most of the pipeline idle."""
    if c.pp == 1 or not c.micro_batches or c.micro_batches >= c.pp:
        return None
    assert c.dp
    idle = (c.pp - 1) / (c.micro_batches * (c.vpp or 1) + c.pp - 1)
    batch = c.pp * c.micro_batch_size * c.dp
    return Problem(
        f"{c.micro_batches} micro-batches a step cannot fill {c.pp} pipeline stages: they are idle "
        f"about {idle:.0%} of the time",
        f"--global-batch-size {next_multiple(batch, batch)} or more, or fewer stages",
    )


@rule(
    "network.tensor",
    source="NVIDIA/Megatron-LM, parallelism guide: TP within NVLink",
    severity="warning",
)
def tensor_parallelism_stays_in_the_fast_network(c: Command) -> Problem | None:
    """Tensor parallelism exchanges activations in every layer."""
    if c.fast_domain is None or c.tp <= c.fast_domain:
        return None
    assert c.platform
    return Problem(
        f"TP {c.tp} spans more than the {c.fast_domain} ranks of {c.platform.name} that share a "
        "fast network; every layer then waits for the slow one",
        f"--tensor-model-parallel-size {c.fast_domain} or less; use pipeline, context or expert "
        "parallelism beyond",
    )


@rule("network.experts", source="docs/topology.md", severity="info")
def expert_groups_cross_nodes_knowingly(c: Command) -> Problem | None:
    """An expert group that leaves the fast network exchanges over the slow one."""
    span = c.ep * c.etp
    if not c.experts or c.fast_domain is None or span <= c.fast_domain:
        return None
    assert c.platform
    return Problem(
        f"an expert group of EP {c.ep} x ETP {c.etp} = {span} ranks spans several of the "
        f"{c.fast_domain}-rank domains of {c.platform.name}: its all-to-all crosses the slow "
        "network",
        "if experts fit, --expert-model-parallel-size "
        f"{max(c.fast_domain // c.etp, 1)} or less keeps it inside",
    )


@rule("network.hybridep", source="NVIDIA-NeMo/Automodel#3914", severity="warning")
def hybrid_ep_groups_fill_domains(c: Command) -> Problem | None:
    """HybridEP needs groups that fill whole NVLink domains, or lie inside one."""
    domain = c.fast_domain
    if c.flex_backend != "hybridep" or not c.experts or domain is None:
        return None
    if c.ep <= domain or c.ep % domain == 0:
        return None
    return Problem(
        f"HybridEP wants EP {c.ep} inside an NVLink domain or a multiple of its {domain} ranks",
        f"--expert-model-parallel-size {domain}",
    )


@rule(
    "network.vendor",
    source="deepseek-ai/DeepEP; NVIDIA-NeMo/Megatron-Bridge#3343",
    severity="warning",
)
def flex_kernels_exist_for_the_gpu(c: Command) -> Problem | None:
    """DeepEP, HybridEP and NCCL EP are CUDA libraries, most of them for InfiniBand."""
    if c.flex_backend is None or not c.experts or c.platform is None:
        return None
    if not c.is_nvidia:
        accelerator = c.platform.need_accelerator().name
        if "MI3" in accelerator:
            return None  # AMD's own builds and UCCL-EP run there
        return Problem(
            f"{c.flex_backend} is a CUDA library; {c.platform.name} has {accelerator}, for "
            "which it has no kernels",
            "--moe-token-dispatcher-type alltoall",
        )
    crosses = c.fast_domain is not None and c.ep * c.etp > c.fast_domain
    if crosses and "Slingshot" in c.platform.description:
        return Problem(
            f"{c.flex_backend} needs InfiniBand or RoCE between nodes, and {c.platform.name} has "
            "Slingshot",
            "--moe-token-dispatcher-type alltoall, or EP within a node",
        )
    return None


@rule("dispatcher.fake", source="NVIDIA/Megatron-LM#2280", severity="info")
def fake_groups_train_nothing(c: Command) -> Problem | None:
    """A fake process group is for trying a command on one GPU."""
    if c.fake_process_group:
        return Problem(
            "--fake-process-group communicates nothing: it tries a large layout on one GPU", ""
        )
    return None
