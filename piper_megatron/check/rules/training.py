"""Iterations, learning rate, data and checkpoints of a training run."""

from piper_megatron.check.command import Command
from piper_megatron.check.rule import Problem, rule

ARGUMENTS = "training/arguments.py"


@rule(
    "flags.removed",
    f"{ARGUMENTS}:573",
    f"{ARGUMENTS}:576",
    f"{ARGUMENTS}:579",
    f"{ARGUMENTS}:584",
    f"{ARGUMENTS}:1350",
)
def removed_flags_are_not_used(c: Command) -> Problem | None:
    """Flags that Megatron still parses and then refuses."""
    replaced = {
        ("--batch-size", "--micro-batch-size"): c.batch_size is not None,
        ("--warmup", "--lr-warmup-fraction"): c.warmup is not None,
        ("--model-parallel-size", "--tensor-model-parallel-size"): (
            c.model_parallel_size is not None
        ),
        ("--checkpoint-activations", "--recompute-activations"): c.checkpoint_activations,
    }
    for (old, new), used in replaced.items():
        if used:
            return Problem(f"{old} is no longer valid", f"{new} instead")
    return None


@rule(
    "iterations.or-samples",
    f"{ARGUMENTS}:1239",
    f"{ARGUMENTS}:1241",
    f"{ARGUMENTS}:1243",
    f"{ARGUMENTS}:1253",
    f"{ARGUMENTS}:1255",
    f"{ARGUMENTS}:1257",
)
def training_counts_iterations_or_samples(c: Command) -> Problem | None:
    """A run counts iterations or samples, and its learning rate schedule the same."""
    if c.skip_train:
        return None
    by_iterations = {
        "--train-samples": bool(c.train_iters) and c.train_samples is not None,
        "--lr-decay-samples": bool(c.train_iters) and c.lr_decay_samples is not None,
        "--lr-warmup-samples": bool(c.train_iters) and c.lr_warmup_samples != 0,
    }
    by_samples = {
        "--train-iters": bool(c.train_samples) and c.train_iters is not None,
        "--lr-decay-iters": bool(c.train_samples) and c.lr_decay_iters is not None,
        "--lr-warmup-iters": bool(c.train_samples) and c.lr_warmup_iters != 0,
    }
    for unit, wrong in (("--train-iters", by_iterations), ("--train-samples", by_samples)):
        found = [flag for flag, is_wrong in wrong.items() if is_wrong]
        if found:
            return Problem(f"{unit} excludes {', '.join(found)}", f"drop {', '.join(found)}")
    return None


@rule("iterations.warmup", f"{ARGUMENTS}:1246", f"{ARGUMENTS}:1260", fix="keep one of the two")
def warmup_is_given_once(c: Command) -> bool:
    """--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples."""
    if c.skip_train or c.lr_warmup_fraction is None:
        return False
    return bool((c.train_iters and c.lr_warmup_iters) or (c.train_samples and c.lr_warmup_samples))


@rule("iterations.phases", f"{ARGUMENTS}:672", fix="give whole numbers separated by commas")
def phases_are_iterations(c: Command) -> bool:
    """--phase-transition-iterations '{c.phase_transition_iterations}' is not a list of numbers."""
    text = c.phase_transition_iterations
    return bool(text) and not all(
        part.strip().removeprefix("-").isdigit() for part in text.split(",")
    )


@rule("learning.minimum", f"{ARGUMENTS}:1320", fix="--min-lr {c.lr} or less")
def learning_rate_is_above_its_minimum(c: Command) -> bool:
    """--min-lr {c.min_lr} is more than --lr {c.lr}."""
    return c.lr is not None and c.min_lr > c.lr


@rule(
    "learning.weight-decay",
    f"{ARGUMENTS}:1354",
    f"{ARGUMENTS}:1355",
    f"{ARGUMENTS}:1359",
    f"{ARGUMENTS}:1360",
)
def weight_decay_has_ends_when_it_changes(c: Command) -> Problem | None:
    """Weight decay has a start and an end exactly when it is not constant."""
    given = [c.start_weight_decay is not None, c.end_weight_decay is not None]
    if c.weight_decay_incr_style == "constant":
        if not any(given):
            return None
        return Problem(
            "--start-weight-decay and --end-weight-decay need a --weight-decay-incr-style",
            "drop them, or --weight-decay-incr-style linear",
        )
    if all(given):
        return None
    return Problem(
        f"--weight-decay-incr-style {c.weight_decay_incr_style} needs --start-weight-decay and "
        "--end-weight-decay",
        "add both",
    )


@rule("model.layers-once", f"{ARGUMENTS}:1265", fix="drop --encoder-num-layers")
def layers_are_given_once(c: Command) -> bool:
    """--num-layers and --encoder-num-layers are both given."""
    has_layers = c.values.num_layers is not None or c.hybrid_pattern is not None
    return has_layers and c.encoder_num_layers is not None


@rule("data.threads", f"{ARGUMENTS}:1218", fix="--num-dataset-builder-threads 1")
def datasets_are_built_by_a_thread(c: Command) -> bool:
    """--num-dataset-builder-threads {c.num_dataset_builder_threads} must be positive."""
    return c.num_dataset_builder_threads <= 0


@rule("data.one-source", f"{ARGUMENTS}:659", f"{ARGUMENTS}:666", f"{ARGUMENTS}:1624")
def data_come_from_one_source(c: Command) -> Problem | None:
    """Data come from one place."""
    splits = any((c.train_data_path, c.valid_data_path, c.test_data_path))
    split_given = any(
        path is not None for path in (c.train_data_path, c.valid_data_path, c.test_data_path)
    )
    if c.data_path is not None and c.data_args_path is not None:
        return Problem("--data-path and --data-args-path exclude each other", "keep one of the two")
    if split_given and c.per_split_data_args_path is not None:
        return Problem(
            "--per-split-data-args-path excludes --train-data-path and its like",
            "keep one of the two",
        )
    sources = {
        "--mock-data": c.mock_data,
        "--data-path": bool(c.data_path),
        "--train-data-path and its like": splits,
    }
    given = [flag for flag, there in sources.items() if there]
    if len(given) > 1:
        return Problem(f"{', '.join(given)}: data come from one source", "keep one of them")
    return None


@rule(
    "data.infilling",
    f"{ARGUMENTS}:1637",
    f"{ARGUMENTS}:1638",
    f"{ARGUMENTS}:1639",
    f"{ARGUMENTS}:1640",
)
def infilling_has_conditions(c: Command) -> Problem | None:
    """Fill-in-the-middle needs real data and rates."""
    if not c.fim_data:
        return None
    if c.mock_data:
        return Problem("--fim-data does not work with --mock-data", "drop one of the two")
    if not c.fim_rate or not c.fim_spm_rate:
        return Problem("--fim-data needs --fim-rate and --fim-spm-rate above 0", "give both")
    return None


@rule("checkpoint.save", f"{ARGUMENTS}:1322", f"{ARGUMENTS}:1323", fix="add --save-interval")
def saving_has_an_interval(c: Command) -> bool:
    """--save needs a positive --save-interval."""
    return c.save is not None and (c.save_interval is None or c.save_interval <= 0)


@rule("checkpoint.retain", f"{ARGUMENTS}:1325", f"{ARGUMENTS}:1326")
def retained_checkpoints_are_saved_ones(c: Command) -> Problem | None:
    """Checkpoints to retain are among those that are saved."""
    retain, interval = c.save_retain_interval, c.save_interval
    if c.save is None or retain is None or not interval or interval < 0:
        return None
    if retain > 0 and retain % interval == 0:
        return None
    return Problem(
        f"--save-retain-interval {retain} is not a multiple of --save-interval {interval}",
        f"--save-retain-interval {interval}",
    )


@rule("checkpoint.params", f"{ARGUMENTS}:1328", fix="drop --overlap-param-gather")
def saving_parameters_excludes_overlapped_gather(c: Command) -> bool:
    """--save-params-interval excludes --overlap-param-gather."""
    return c.save is not None and c.save_params_interval is not None and c.overlap_param_gather


@rule("log.memory", f"{ARGUMENTS}:1330", fix="--log-memory-interval {c.log_interval}")
def memory_is_logged_with_the_rest(c: Command) -> bool:
    """--log-memory-interval {c.log_memory_interval} is not a multiple of --log-interval \
    {c.log_interval}."""
    every = c.log_interval
    return c.log_memory_interval is not None and (every == 0 or c.log_memory_interval % every != 0)


@rule("checkpoint.convert", f"{ARGUMENTS}:392", f"{ARGUMENTS}:393", since="0.18.2")
def conversion_has_both_ends(c: Command) -> Problem | None:
    """Converting checkpoints needs a source and a target."""
    if c.ckpt_convert_format is None or (c.ckpt_convert_save is not None and c.load is not None):
        return None
    return Problem("--ckpt-convert-format needs --load and --ckpt-convert-save", "add both")


@rule("checkpoint.non-persistent", f"{ARGUMENTS}:397", f"{ARGUMENTS}:1814")
def non_persistent_checkpoints_have_a_place(c: Command) -> Problem | None:
    """Non-persistent checkpoints are global, or local with a folder."""
    if c.non_persistent_ckpt_type == "in_memory":
        return Problem(
            "--non-persistent-ckpt-type in_memory is parsed but not supported",
            "--non-persistent-ckpt-type global or local",
        )
    if c.non_persistent_ckpt_type == "local" and c.non_persistent_local_ckpt_dir is None:
        return Problem(
            "--non-persistent-ckpt-type local needs --non-persistent-local-ckpt-dir",
            "add --non-persistent-local-ckpt-dir",
        )
    return None


@rule("checkpoint.replication", f"{ARGUMENTS}:1816", f"{ARGUMENTS}:1817")
def replication_has_conditions(c: Command) -> Problem | None:
    """Replication is of local checkpoints, with a jump."""
    if not c.replication:
        return None
    if c.replication_jump is not None and c.non_persistent_ckpt_type == "local":
        return None
    return Problem(
        "--replication needs --replication-jump and --non-persistent-ckpt-type local",
        "add both, or drop --replication",
    )


@rule("checkpoint.main-params", f"{ARGUMENTS}:1738", fix="add --no-load-optim")
def main_parameters_replace_the_optimizers(c: Command) -> bool:
    """--load-main-params-from-ckpt needs --no-load-optim."""
    return c.load_main_params_from_ckpt and not c.no_load_optim


@rule("checkpoint.logits", f"{ARGUMENTS}:1752", f"{ARGUMENTS}:1753", since="0.19.2")
def saved_logits_have_conditions(c: Command) -> Problem | None:
    """Saving logits needs a number of them and asynchronous saving."""
    if c.logits_save_dir is None:
        return None
    asynchronous = c.async_save and (c.use_persistent_ckpt_worker or not c.use_dist_ckpt)
    if c.logits_save_top_k is not None and asynchronous:
        return None
    return Problem(
        "--logits-save-dir needs --logits-save-top-k, --async-save and "
        "--use-persistent-ckpt-worker",
        "add them",
    )


@rule("checkpoint.override", f"{ARGUMENTS}:1771", fix="drop one of the two", since="0.19.2")
def finetuning_starts_at_zero(c: Command) -> bool:
    """--override-ckpt-iteration and --finetune exclude each other."""
    return c.override_ckpt_iteration is not None and c.finetune


@rule("checkpoint.arguments", f"{ARGUMENTS}:93", f"{ARGUMENTS}:94")
def arguments_of_a_checkpoint_need_one(c: Command) -> Problem | None:
    """Arguments can only be read from a checkpoint that is named."""
    if not c.use_checkpoint_args:
        return None
    if c.load is None and c.pretrained_checkpoint is None:
        return Problem("--use-checkpoint-args needs --load", "add --load")
    if c.non_persistent_ckpt_type == "local":
        return Problem(
            "--use-checkpoint-args does not work with --non-persistent-ckpt-type local",
            "drop one of the two",
        )
    return None
