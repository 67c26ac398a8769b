"""Memory as the Piper paper counts it (arXiv:2605.05049, equations 1-5 and figure 10).

A reference to compare with: every layer is attention of four d x d matrices and routed experts, a
parameter costs 16 bytes on every rank that holds it, and there is no embedding. The estimate of a
Megatron job is in `states.py` and `activations.py`.

In equations 2-5, `batch` counts for attention on one rank and for experts in the whole
expert-parallel group, as printed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from piper_megatron.workload.spec import Experts, ModelSpec

BYTES_PER_PARAMETER = 16  # fp16 weight and gradient, fp32 main parameter and two moments
_HALF = 2


@dataclass(frozen=True)
class Grid:
    """Pipeline and expert parallel sizes, and the bytes that a rank of the largest stage needs."""

    pp: int
    ep: int
    states_bytes: int
    checkpoint_bytes: int

    @property
    def total_bytes(self) -> int:
        """States, and activations kept at two boundaries a layer."""
        return self.states_bytes + self.checkpoint_bytes


def layer_parameters(model: ModelSpec, experts: float) -> float:
    """Parameters of a layer with so many experts."""
    return 4 * model.hidden**2 + experts * _matrices(model) * model.hidden * _experts(model).ffn


def parameters(model: ModelSpec) -> float:
    """Of the whole model."""
    return model.layers * layer_parameters(model, _experts(model).count)


def active_parameters(model: ModelSpec) -> float:
    """That a token uses."""
    return model.layers * layer_parameters(model, _experts(model).topk)


def grid(model: ModelSpec, pp: int, ep: int, tokens: int) -> Grid:
    """What a PP x EP grid needs on the stage with most layers, activations checkpointed.

    Args:
        model: what is trained.
        pp: pipeline ranks.
        ep: expert-parallel size.
        tokens: of a micro-batch on one GPU.
    """
    layers = -(-model.layers // pp)
    states = BYTES_PER_PARAMETER * layers * layer_parameters(model, _experts(model).count / ep)
    boundaries = layers * pp * 2 * tokens * model.hidden * _HALF
    return Grid(pp, ep, round(states), boundaries)


def fitting_grids(
    model: ModelSpec, gpus: int, tokens: int, capacity_bytes: float, most_ep: int
) -> list[Grid]:
    """Grids of exactly so many GPUs that fit.

    Args:
        model: what is trained.
        gpus: PP x EP.
        tokens: of a micro-batch on one GPU.
        capacity_bytes: of one GPU.
        most_ep: larger expert-parallel groups are left out.
    """
    found = [grid(model, pp, ep, tokens) for pp, ep in _grids(model, gpus) if ep <= most_ep]
    return [candidate for candidate in found if candidate.total_bytes <= capacity_bytes]


def _grids(model: ModelSpec, gpus: int) -> Iterator[tuple[int, int]]:
    for ep in range(1, _experts(model).count + 1):
        fits = gpus % ep == 0 and _experts(model).count % ep == 0
        if fits and gpus // ep <= model.layers:
            yield gpus // ep, ep


def attention_activation_bytes(
    model: ModelSpec, seq: int, batch: float, *, flash: bool = False
) -> float:
    """Activations that one layer's attention keeps."""
    heads = model.attention.heads
    scores = 2 * batch * heads * seq if flash else 4 * batch * heads * seq**2
    return 12 * batch * seq * model.hidden + scores


def expert_activation_bytes(model: ModelSpec, seq: int, batch: float, ep: int = 1) -> float:
    """Activations that one layer's experts keep on one rank."""
    experts = _experts(model)
    wide = _matrices(model) * experts.ffn + model.hidden
    return _HALF * batch * seq * experts.topk / ep * wide


def memory_alone_bytes(model: ModelSpec, seq: int, batch: float) -> float:
    """Equation 1: on one GPU of any size."""
    return memory_expert_parallel_bytes(model, seq, batch, ep=1)


def memory_expert_parallel_bytes(model: ModelSpec, seq: int, batch: float, ep: int) -> float:
    """Equation 2: experts shared out over `ep` GPUs."""
    return model.layers * _layer_bytes(model, seq, batch, ep, kept=1)


def memory_gpipe_bytes(model: ModelSpec, seq: int, batch: float, pp: int, ep: int) -> float:
    """Equation 3: layers shared out too, all micro-batches alive."""
    return model.layers / pp * _layer_bytes(model, seq, batch, ep, kept=1)


def memory_1f1b_bytes(
    model: ModelSpec, seq: int, batch: float, pp: int, ep: int, micro_batches: int, stage: int
) -> float:
    """Equation 4: stage i keeps PP - i micro-batches."""
    kept = pp - stage
    return model.layers / pp * _layer_bytes(model, seq, batch / micro_batches, ep, kept=kept)


def stage_imbalance_bytes(
    model: ModelSpec, seq: int, batch: float, pp: int, ep: int, micro_batches: int
) -> float:
    """Equation 5: what the first stage keeps more than the last."""
    small = batch / micro_batches
    kept = attention_activation_bytes(model, seq, small)
    kept += expert_activation_bytes(model, seq, small, ep)
    return model.layers * (pp - 1) / pp * kept


def _layer_bytes(model: ModelSpec, seq: int, batch: float, ep: int, kept: int) -> float:
    states = BYTES_PER_PARAMETER * layer_parameters(model, _experts(model).count / ep)
    activations = attention_activation_bytes(model, seq, batch)
    activations += expert_activation_bytes(model, seq, batch, ep)
    return states + kept * activations


def _matrices(model: ModelSpec) -> int:
    return 3 if model.gated else 2


def _experts(model: ModelSpec) -> Experts:
    assert model.experts is not None, "the Piper accounting is of models with experts"
    return model.experts
