#!/usr/bin/env bash
# A tiny Mixtral-like GPT on this machine's CPU: 4 ranks on a 2x2 (pipeline x expert) grid.
#
# What:   8 experts top-2, grouped-query attention, bytes of Python's sources as text
# Where:  one machine with 2 cores, no GPU; from the root of the repository
# Takes:  about a minute; further arguments go to Megatron and win, for instance --train-iters 5
set -euo pipefail

PRETRAIN=${PRETRAIN:-examples/pretrain_moe.py}
OUT=${PIPER_DEMO_DIR:-out/demo}
TEXT=$OUT/text

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 64
    --ffn-hidden-size 128
    --num-attention-heads 4
    --group-query-attention
    --num-query-groups 2
    --seq-length 64
    --max-position-embeddings 64
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
)
MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0.01
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
)
PARALLEL_ARGS=(
    --piper-grid 2x2
    --piper-topology auto
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
    --train-iters 30
    --lr 4e-3
    --lr-warmup-fraction 0.1
    --lr-decay-style cosine
    --log-interval 1
    --logging-level 30
    --eval-interval 1000
    --eval-iters 0
)

[ -f "$TEXT.idx" ] || python -W ignore examples/prepare_text.py --output "$TEXT"

piper-megatron run --cpu --nproc 4 "$PRETRAIN" \
    "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" \
    "${TRAIN_ARGS[@]}" "$@"
