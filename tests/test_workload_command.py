"""From commands and shell scripts to Megatron's arguments, as a real shell would pass them."""

import os
import random
import shlex
import subprocess
from pathlib import Path

import pytest
from test_examples import EXAMPLES, GRIDS, Recorder
from tiny import ROOT

from piper_megatron.errors import WorkloadError
from piper_megatron.workload.arguments import read_arguments
from piper_megatron.workload.command import read_command
from piper_megatron.workload.shell import Shell

MODEL = "--num-layers 4 --hidden-size 64"


@pytest.fixture
def stand_ins(tmp_path) -> Path:
    """Commands that write their words down, one a line."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("torchrun", "srun", "python", "mpiexec"):
        command = folder / name
        command.write_text(f"#!/bin/sh\nprintf '%s\\n' {name} \"$@\" @end@ >> {tmp_path}/words\n")
        command.chmod(0o755)
    return folder


def started_by_bash(stand_ins: Path, script: str, *arguments: str) -> list[list[str]]:
    """Words of every command that a real shell starts."""
    log = stand_ins.parent / "words"
    log.unlink(missing_ok=True)
    subprocess.run(
        ["bash", "-c", script, "script", *arguments],
        env={"PATH": f"{stand_ins}:{os.environ['PATH']}"},
        cwd=stand_ins.parent,
        capture_output=True,
    )
    text = log.read_text() if log.exists() else ""
    return [words.split("\n")[:-1] for words in text.split("@end@\n")[:-1]]


def started_by_us(script: str, *arguments: str) -> list[list[str]]:
    shell = Shell()
    shell.run_text(script, "script", arguments)
    commands = [
        [shell.variables.shown(word) for word in started.words if word != "bash"]
        for started in shell.started
    ]
    return [words for words in commands if words[0] in ("torchrun", "srun", "python", "mpiexec")]


# --- commands ---


@pytest.mark.parametrize(
    ("command", "gpus"),
    [
        (f"{MODEL}", None),
        (f"-- {MODEL}", None),
        (f"torchrun --nproc_per_node=8 pretrain_gpt.py {MODEL}", 8),
        (f"torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py {MODEL}", 32),
        (f"torchrun --nproc-per-node gpu pretrain_gpt.py {MODEL}", None),
        (f"torchrun --nproc-per-node 8 --nnodes 1:4 pretrain_gpt.py {MODEL}", None),
        (f"srun -N 2 torchrun --nproc-per-node 8 --nnodes auto pretrain_gpt.py {MODEL}", 16),
        (f"python -m torch.distributed.run --nproc_per_node 4 pretrain_gpt.py {MODEL}", 4),
        (f"python -u pretrain_gpt.py {MODEL}", None),
        (f"torchrun --nproc-per-node 2 -m my.pretrain {MODEL}", 2),
        (f"srun -N 16 --ntasks-per-node=8 python -u pretrain_gpt.py {MODEL}", 128),
        (f"srun -N16 -n64 python pretrain_gpt.py {MODEL}", 64),
        (f"srun -n 64 --gpus-per-node=h100:8 env A=1 python pretrain_gpt.py {MODEL}", 64),
        (f"srun -N 4 --gres=gpu:8 python pretrain_gpt.py {MODEL}", 32),
        (f"srun -N 4 --ntasks-per-node=1 torchrun --nnodes 4 --nproc_per_node 8 p.py {MODEL}", 32),
        (f"mpirun -np 16 python pretrain_gpt.py {MODEL}", 16),
        (f"mpiexec -n 48 -ppn 12 python pretrain_gpt.py {MODEL}", 48),
        (f"flux run -N 4 -n 32 python pretrain_gpt.py {MODEL}", 32),
        (f"piper-megatron run --cpu --nproc 8 examples/pretrain_moe.py {MODEL}", 8),
        (f"OMP_NUM_THREADS=1 env B=2 torchrun --nproc_per_node 8 p.py {MODEL}", 8),
        (f"nsys profile -o out -f true torchrun --nproc_per_node 8 pretrain_gpt.py {MODEL}", 8),
        (f"apptainer exec --rocm image.sif torchrun --nproc_per_node 8 p.py {MODEL}", 8),
        (f"some-launcher {MODEL}", None),
    ],
)
def test_arguments_and_ranks_of_a_command(command, gpus):
    for tokens in (shlex.split(command), [command]):
        found = read_command(tokens)
        assert (list(found.arguments), found.gpus) == (MODEL.split(), gpus)


def test_a_command_inside_a_shell_keeps_what_starts_the_shell():
    inner = f"export A=3; python pretrain_gpt.py {MODEL} --moe-router-topk $A"
    found = read_command(["srun", "-N", "2", "--ntasks-per-node", "4", "bash", "-lc", inner])
    assert found.arguments == (*MODEL.split(), "--moe-router-topk", "3")
    assert found.gpus == 8


def test_piper_flags_begin_arguments_like_megatrons():
    assert read_command(["launcher", "--piper-grid", "2x4", *MODEL.split()]).arguments == (
        *("--piper-grid", "2x4"),
        *MODEL.split(),
    )


@pytest.mark.parametrize("script", ["pretrain_bert.py", "pretrain_t5.py", "x/pretrain_mamba.py"])
def test_scripts_that_train_no_gpt_are_refused(script):
    with pytest.raises(WorkloadError, match=f"{script} trains no GPT"):
        read_command(["torchrun", "--nproc_per_node", "8", script, *MODEL.split()])


def test_unknown_flags_are_listed_with_their_values():
    arguments = read_arguments(["python", "p.py", *MODEL.split(), "--my-own", "3", "--other"])
    assert arguments.unknown == ("--my-own", "3", "--other")
    assert arguments.given == {"num_layers", "hidden_size"}


def test_a_grid_sets_the_sizes_that_megatron_gets():
    values = read_arguments([*MODEL.split(), "--piper-grid", "4x8"]).values
    assert values.pipeline_model_parallel_size == 4
    assert values.expert_model_parallel_size == 8


# --- scripts ---


@pytest.mark.parametrize("name", GRIDS)
def test_examples_are_read_as_a_shell_runs_them(name, tmp_path):
    launched = Recorder(tmp_path).launch(name, "--seed", "7")
    environment = ["TOKENIZER=tokenizer", f"PIPER_DEMO_DIR={tmp_path}/out", "SLURM_JOB_ID=1"]
    if "xmoe" not in name:
        environment.append("DATA_PATH=corpus")
    starter = "sbatch" if name.endswith(".sbatch") else "bash"
    found = read_command([*environment, starter, str(EXAMPLES / name), "--seed", "7"])
    assert list(found.arguments) == launched.argv
    assert found.gpus == launched.world


@pytest.mark.parametrize("name", GRIDS)
def test_examples_are_read_without_their_environment(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = read_arguments([f"examples/{name}"])
    assert arguments.unknown == ()
    assert arguments.gpus in (4, 8, 32, 80, 480, 512)


SCRIPTS = {
    "continuation and comments": """
        torchrun p.py --num-layers 4 \\
            --a 1 \\
            --b "x # y" # --c 2
    """,
    "variables and quotes": """
        TP=8; NAME='two words' ; E=; MIX=$TP"-$NAME"'$TP'
        torchrun p.py --tp $TP --tp ${TP} --n "$NAME" --split $NAME --mix "$MIX"
        torchrun \\$TP --e "" $E"" "$E" $E
    """,
    "defaults": """
        A=5; E=
        torchrun ${A:-1} ${B:-2} ${E:-3} ${E-4} ${A:+6} ${B:+7} ${C:=8} $C "${D:-a b}" ${D:-a b}
    """,
    "arithmetic": """
        N=4; G=8; W=$((N * G)); ((X = W / 3)); Y=$(( (N + 2) * -G % 5 )); let "Q=N*2" R=9
        ((R++)); ((R += 2))
        torchrun $W $X $Y $Q $R $((W > 30 && N == 4)) $((N ? 7 : 9)) $(( ${N} ** 2 ))
        torchrun $((N<<2)) $((-N ** 2 / 3)) $((!N + 7 & 6 | 1))
    """,
    "arrays": """
        A=(--a 1 "two words"); A+=(--b $((1+1))); B=("${A[@]}" last); C=(x)
        C+=("E|t*3|L"); EMPTY=()
        torchrun "${A[@]}" ${B[*]} "${B[*]}" ${#B[@]} ${B[2]} $C "${C[@]}" "${EMPTY[@]}" end
    """,
    "layouts": """
        LAYOUT="Et*3|(tt|)*2t|tL"
        torchrun --pipeline-model-parallel-layout "$LAYOUT" --moe-layer-freq '([0]*3+[1]*5)'
    """,
    "strings of options": """
        ARGS="--a 1 \\
              --b 2"
        CMD="torchrun p.py $ARGS"
        $CMD --c 3
        eval "$CMD --d '4 5'"
    """,
    "conditions": """
        N=4
        if [ $N -gt 8 ]; then A=big; elif [[ "$N" == 4 && -n "$N" ]]; then A=four; else A=none; fi
        [ -z "$UNSET" ] && B=empty
        [[ $A == f* ]] || B=no
        if ! [ "$N" = 5 ]; then C=(--not-five); fi
        [ $N -eq 4 ] && [ $N -lt 5 ] && D=both
        torchrun $A $B "${C[@]}" $D
    """,
    "cases": """
        SIZE=7b
        case $SIZE in
            1b|3b) L=16 ;;
            7*) L=32; H=4096 ;;
            *) L=1 ;;
        esac
        torchrun $L $H
    """,
    "loops": """
        SUM=0
        for i in 1 2 3; do SUM=$((SUM + i)); A+=(--i $i); done
        N=0; while [ $N -lt 3 ]; do N=$((N + 1)); done
        torchrun $SUM "${A[@]}" $N
    """,
    "functions": """
        run() { local extra=$1; shift; torchrun "$@" --extra "$extra" $#; }
        extra=outer
        run one two "three four"
        torchrun $extra
    """,
    "parameters": """
        MODEL=${1:-small}; shift
        while [[ $# -gt 0 ]]; do
            case $1 in --layers) LAYERS=$2; shift 2 ;; *) REST+=("$1"); shift ;; esac
        done
        torchrun $MODEL $LAYERS "${REST[@]}"
    """,
    "pieces of values": """
        P=path/to/model.tar.gz
        torchrun ${P##*/} ${P%%.*} ${P#*/} ${P%.*} ${P/to/from} ${P:0:4} ${P:5} ${#P} ${P^^}
    """,
    "pipes and redirections": """
        LOG=log
        torchrun a b 2>&1 | tee "$LOG"
        OMP_NUM_THREADS=1 torchrun c > out || exit 1
        torchrun d &
        wait
    """,
    "assignments on lines of their own": """
        A=1 B=2
        export C=$A$B D=4
        declare -i E=5
        torchrun $A $B $C $D $E
    """,
    "subshells": """
        A=1; B=2
        (A=3; torchrun $A $B)
        echo x | A=4
        torchrun $A ${B}
    """,
    "an early end": """
        torchrun first
        exit 0
        torchrun second
    """,
    "here-documents": """
        A=3
        bash <<EOF
        torchrun p.py --a $A
EOF
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_a_real_shell(name, stand_ins):
    arguments = ("big", "--layers", "12", "a b") if name == "parameters" else ()
    expected = started_by_bash(stand_ins, SCRIPTS[name], *arguments)
    assert expected
    assert started_by_us(SCRIPTS[name], *arguments) == expected


def random_script(rng: random.Random) -> str:
    """Statements over a few variables, then a command with what came of them."""
    return "\n".join(
        [
            "A=1 B=2; C='x y'; D=(a b); E=; F=",
            *(_random_statement(rng, 2) for _ in range(rng.randint(2, 8))),
            'torchrun "$A" $B "$C" $C "${D[@]}" ${D[0]} ${#D[@]} ${E:-none}',
        ]
    )


def _random_statement(rng: random.Random, depth: int) -> str:
    name, number = rng.choice("ABE"), rng.randint(0, 9)
    simple = (
        f"{name}={number}",
        f"{name}=$(( {rng.choice('AB')} {rng.choice('+ - * < == &&'.split())} {number} ))",
        f"(( {name} = {number} {rng.choice('+-*')} A ))",
        f'C="$C-${name}"',
        f"C=${{C{rng.choice(('%', '%%', '#', '##'))}{rng.choice(('-*', '*-', 'x', '?'))}}}",
        f'D+=("${name}" {number})',
        'D=("${D[@]}" $C)',
        f"{name}=${{{rng.choice('ABEF')}:{rng.choice('-+=')}{number}}}",
    )
    if not depth or rng.random() < 0.6:
        return rng.choice(simple)
    body = "; ".join(_random_statement(rng, depth - 1) for _ in range(rng.randint(1, 2)))
    other = _random_statement(rng, depth - 1)
    condition = rng.choice(
        (
            f'[ "${name}" {rng.choice(("=", "!="))} {number} ]',
            f"[[ $A {rng.choice(('-lt', '-ge', '-eq'))} {number} ]]",
            f'[[ -n "$E" {rng.choice(("&&", "||"))} $B == {number} ]]',
            f"(( A > {number} ))",
            '[ -z "$F" ]',
        )
    )
    return rng.choice(
        (
            f"if {condition}; then {body}; else {other}; fi",
            f"{condition} && {{ {body}; }}",
            f"{condition} || {{ {body}; }}",
            f"for A in {number} $B 3; do {body}; done",
            f"case $B in {number}|1) {body} ;; [2-5]) {other} ;; esac",
            f"f() {{ {body}; }}; f",
        )
    )


def test_random_scripts_pass_the_words_of_a_real_shell(stand_ins):
    rng = random.Random(11)
    for _ in range(400):
        script = random_script(rng)
        assert started_by_us(script) == started_by_bash(stand_ins, script), script


def test_batch_options_say_how_many_ranks_start(tmp_path):
    script = tmp_path / "job.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=6 # of them\n#SBATCH --ntasks-per-node 4\n"
        f"srun python p.py {MODEL} --global-batch-size $((SLURM_NNODES * 4))\n"
    )
    assert read_command([str(script)]).gpus == 24
    assert read_command([str(script)]).arguments[-1] == "24"
    assert read_command(["sbatch", "-N", "2", str(script)]).gpus == 8


def test_sourced_files_are_found_beside_the_script(tmp_path):
    (tmp_path / "model.sh").write_text("MODEL=(--num-layers 12)\n")
    (tmp_path / "run.sh").write_text('source model.sh\ntorchrun p.py "${MODEL[@]}"\n')
    assert read_command([str(tmp_path / "run.sh")]).arguments == ("--num-layers", "12")


def test_arguments_behind_a_path_are_added_where_the_script_drops_them(tmp_path):
    script = tmp_path / "run.sh"
    behind = ("--num-layers", "8", "--swiglu")
    for passes_on in ("", ' "$@"'):
        script.write_text(f"torchrun p.py {MODEL}{passes_on}\n")
        assert read_command([str(script), *behind]).arguments == (*MODEL.split(), *behind)
    assert read_command([str(script), "--layers", "8"]).arguments[-2:] == ("--layers", "8")
    script.write_text(f"torchrun p.py {MODEL} --moe-router-topk $2\n")
    assert read_command([str(script), "--topk", "8"]).arguments[-1] == "8"
    assert read_command(["bash", str(script), "--seed", "8"]).arguments[-1] == "8"


def test_variables_before_the_command_are_the_scripts(tmp_path):
    (tmp_path / "run.sh").write_text("torchrun p.py --num-layers ${LAYERS:-4} $1\n")
    command = ["LAYERS=12", "bash", str(tmp_path / "run.sh"), "--swiglu"]
    assert read_command(command).arguments == ("--num-layers", "12", "--swiglu")


def test_both_sides_of_what_only_the_machine_knows_are_followed():
    script = f"""
        if [ -f /etc/cluster ]; then DATA=/a; else DATA=/b; fi
        nvidia-smi && torchrun --nproc_per_node 4 p.py {MODEL} --data-path $DATA
        nvidia-smi || torchrun --nproc_per_node 8 p.py {MODEL} --data-path $DATA
    """
    found = read_command([script])
    assert found.arguments == (*MODEL.split(), "--data-path", "$DATA")
    assert found.gpus is None


def test_what_changes_nothing_may_stay_without_a_value():
    script = (
        f"torchrun p.py {MODEL} --save $OUT/$(date) --load=$OUT --data-path 1 $X --seed $RANDOM "
        "--train-iters=$ITERS --my-own $VALUE --lr 1e-3"
    )
    assert read_command([script]).arguments == (
        *MODEL.split(),
        *("--save", "$OUT/$(date)", "--load=$OUT", "--data-path", "1", "$X"),
        *("--my-own", "$VALUE", "--lr", "1e-3"),
    )


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("torchrun p.py\n--num-layers 4 --swiglu $MORE", "$MORE behind --swiglu has no value"),
        (
            "torchrun p.py --hidden-size 4 \\\n --num-layers $N",
            "it is not set (the command, line 2)",
        ),
        ("torchrun p.py --num-layers=${N}", "${N} behind --num-layers has no value"),
        ("torchrun p.py --num-layers $(nproc)", "its output is not known without running it"),
        ("N=$(nproc)\ntorchrun p.py --num-layers $((N * 2))", "it cannot be calculated"),
        ("torchrun p.py --num-layers 4 ${ARGS[@]}", "${ARGS[@]} behind --num-layers has no value"),
        (
            "torchrun p.py --num-layers 4 --pipeline-model-parallel-layout $LAYOUT",
            "$LAYOUT behind --pipeline-model-parallel-layout has no value",
        ),
        (f"torchrun p.py {MODEL} --piper-grid $GRID", "$GRID behind --piper-grid has no value"),
        (
            "if [ -f x ]; then N=4; fi\ntorchrun p.py --num-layers $N",
            "what it is depends on the machine",
        ),
        (
            f"torchrun a.py {MODEL}\ntorchrun b.py {MODEL} --swiglu",
            "line 1 and the command, line 2",
        ),
        ("A=(1 2", "the command, line 1: not understood as a shell script"),
        ("echo nothing here", "no command with Megatron arguments"),
        ("f() { f; }; f", "scripts or functions call each other"),
        ("while true; do while true; do A=1; done; done", "does not come to an end"),
        ("A=x; while true; do A=$A$A; done", "a variable grows without end"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_its_place(script, message):
    with pytest.raises(WorkloadError) as error:
        read_command([script])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_script_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(WorkloadError, match=r"cannot read missing\.sh: No such file"):
        read_command(["missing.sh"])
    with pytest.raises(WorkloadError, match=r"cannot read missing\.sh: No such file"):
        read_command(["A=1", "bash", "-x", "missing.sh", "--num-layers", "4"])
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match="not a text file"):
        read_command([str(tmp_path / "binary.sh")])


def test_nothing_of_a_script_is_executed(tmp_path):
    trace = tmp_path / "trace"
    script = f"touch {trace}; A=$(touch {trace}) B=`touch {trace}`; torchrun p.py {MODEL}"
    assert read_command([script]).arguments == tuple(MODEL.split())
    assert not trace.exists()
