"""What the placement takes from the arguments of a running job."""

import sys
from types import SimpleNamespace

import pytest
from tiny import tiny_command


def read(argv: list[str], **changed):
    """The workload in the arguments of Megatron's own parser and checks."""
    from megatron.training.arguments import parse_args, validate_args

    from piper_megatron.runtime.workload import workload_of

    sys.argv = ["job", *argv]
    args = parse_args()
    validate_args(args)
    for name, value in changed.items():
        setattr(args, name, value)
    return workload_of(args)


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda *_: SimpleNamespace(major=9))


@pytest.mark.usefixtures("environment")
def test_a_job_is_read_from_megatrons_validated_arguments():
    workload = read(
        tiny_command(
            *"--bf16 --expert-model-parallel-size 4 --moe-layer-freq 2".split(),
            *"--tensor-model-parallel-size 2 --sequence-parallel".split(),
        )
    )
    assert workload.model.name == "this job's arguments"
    assert workload.model.moe_layers == (True, False, True, False)
    assert workload.model.vocab == 127
    assert (workload.batch.micro_batch, workload.batch.global_batch) == (1, 8)
    assert workload.training.dispatcher == "alltoall"
    assert workload.training.sequence_parallel
    assert workload.training.precision == "bf16"


@pytest.mark.usefixtures("environment")
def test_what_is_not_known_when_ranks_are_placed_has_a_stand_in():
    assert read(tiny_command(), vocab_size=None).model.vocab == 50257
    # the first batch of a ramp-up
    assert read(tiny_command(), global_batch_size=3).batch.global_batch == 8


@pytest.mark.usefixtures("environment")
def test_hybrid_models_count_by_their_moe_layers_and_unknown_models_not_at_all():
    hybrid = read(tiny_command(), hybrid_layer_pattern="M*ME", is_hybrid_model=True)
    assert sum(hybrid.model.moe_layers) == 1
    assert read(tiny_command(), heterogeneous_layers_config_path="blocks.json") is None
