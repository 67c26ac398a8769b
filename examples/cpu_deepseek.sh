#!/usr/bin/env bash
# A tiny DeepSeek-style model on this machine's CPU: 8 ranks on a 2x4 (pipeline x expert) grid.
#
# What:   latent attention, 16 routed experts top-4 and a shared one, sigmoid router with expert bias
#         and group-limited routing, first layer dense, one layer of multi-token prediction;
#         bytes of Python's sources as text
# Where:  one machine with 2 cores, no GPU; from the root of the repository
# Takes:  a minute and a half; further arguments go to Megatron and win, for instance --train-iters 5
# Prints: the grid map and one line for each iteration
set -euo pipefail

PRETRAIN=${PRETRAIN:-examples/pretrain_moe.py}
OUT=${PIPER_DEMO_DIR:-out/demo}
TEXT=$OUT/text
LOG=$OUT/train.log

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --ffn-hidden-size 256
    --num-attention-heads 4
    --multi-latent-attention
    --q-lora-rank 64
    --kv-lora-rank 32
    --qk-head-dim 32
    --qk-pos-emb-head-dim 16
    --v-head-dim 32
    --qk-layernorm
    --mtp-num-layers 1
    --mtp-loss-scaling-factor 0.1
    --seq-length 64
    --max-position-embeddings 64
    --position-embedding-type rope
    --rope-type rope
    --no-rope-fusion
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
)
MOE_ARGS=(
    --num-experts 16
    --moe-router-topk 4
    --moe-ffn-hidden-size 64
    --moe-shared-expert-intermediate-size 64
    --moe-layer-freq "([0]*1+[1]*3)"
    --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3
    --moe-router-num-groups 4 # one group of experts on each of the 4 expert-parallel ranks
    --moe-router-group-topk 2
    --moe-router-topk-scaling-factor 2.5
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-4
    --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
)
PARALLEL_ARGS=(
    --piper-grid 2x4
    --piper-topology auto
    --pipeline-model-parallel-layout "Ettt|tmL" # embedding, layers, MTP, loss of the two stages
)
DATA_ARGS=(
    --data-path "$TEXT"
    --data-cache-path "$OUT/cache"
    --split 95,5,0
    --tokenizer-type NullTokenizer
    --vocab-size 257
)
TRAIN_ARGS=(
    --micro-batch-size 4
    --global-batch-size 32
    --train-iters 80
    --lr 4e-3
    --min-lr 4e-4
    --lr-warmup-fraction 0.1
    --lr-decay-style cosine
    --log-interval 1
    --logging-level 30
    --eval-interval 1000
    --eval-iters 0
)

show_progress() {
    awk -F '|' '
        /^Piper grid/, /^(INFO|WARNING|>)/ { if (!/^(INFO|WARNING|>)/) print; fflush() }
        / lm loss: / { sub(/.*\] +iteration/, "iteration"); print $1 "|" $6 "|" $3; fflush() }'
}

mkdir -p "$OUT"
[ -f "$TEXT.idx" ] || python -W ignore examples/prepare_text.py --output "$TEXT"

echo "starting 8 ranks; all of their output is in $LOG"
piper-megatron run --cpu --nproc 8 "$PRETRAIN" \
    "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" \
    "${TRAIN_ARGS[@]}" "$@" 2>&1 | tee "$LOG" | show_progress ||
    { echo "failed; the end of $LOG:" >&2 && tail -n 20 "$LOG" >&2 && exit 1; }
