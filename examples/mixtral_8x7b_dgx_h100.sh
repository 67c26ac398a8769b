#!/usr/bin/env bash
# Mixtral-8x7B (46.7B parameters, 12.9B active; arXiv:2401.04088) on one DGX H100.
#
# Where:  1 node, 8 GPUs of 80 GB, with Transformer Engine; from the root of the repository:
#         DATA_PATH=/path/to/corpus TOKENIZER=/path/to/tokenizer.model \
#             bash examples/mixtral_8x7b_dgx_h100.sh
# Grid:   2x4. Against 1x8 it halves what each GPU holds of the dense parts, at an idle share of the
#         pipeline of 1 / (64 + 1), 2%. Adam with fp32 moments (16 bytes a parameter and more) does
#         not fit on one node; gradients and moments in bf16 and a 16-bit remainder in place of fp32
#         master weights make it 10, about 57 of 80 GiB. Transformer Engine before 2.13 makes fp32
#         copies of such moments while the optimizer steps, which does not fit: use a newer one.
# State:  arguments are checked against Megatron's parser; not run there
set -euo pipefail

: "${DATA_PATH:?prefix of the .bin and .idx files of the training text}"
: "${TOKENIZER:?path of the tokenizer.model that made them}"
CHECKPOINTS=${CHECKPOINTS:-checkpoints/mixtral-8x7b}
PRETRAIN=${PRETRAIN:-examples/pretrain_moe.py} # or the pretrain_gpt.py of a Megatron-LM checkout

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length 4096
    --max-position-embeddings 32768
    --position-embedding-type rope
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --init-method-std 0.02
    --attention-dropout 0
    --hidden-dropout 0
)
MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0.02
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
)
PARALLEL_ARGS=(
    --piper-grid 2x4
    --piper-topology dgx-h100
)
DATA_ARGS=(
    --data-path "$DATA_PATH"
    --split 99,1,0
    --tokenizer-type SentencePieceTokenizer
    --tokenizer-model "$TOKENIZER"
)
TRAIN_ARGS=(
    --bf16
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --use-precision-aware-optimizer
    --main-grads-dtype bf16
    --exp-avg-dtype bf16
    --exp-avg-sq-dtype bf16
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --micro-batch-size 1
    --global-batch-size 256
    --train-iters 50000
    --lr 1e-4
    --min-lr 1e-5
    --lr-decay-style cosine
    --lr-warmup-iters 500
    --adam-beta2 0.95
    --weight-decay 0.1
    --clip-grad 1
    --log-interval 1
    --log-throughput
    --eval-interval 1000
    --eval-iters 10
    --save "$CHECKPOINTS"
    --load "$CHECKPOINTS"
    --save-interval 500
)

piper-megatron run --nproc 8 "$PRETRAIN" \
    "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" \
    "${TRAIN_ARGS[@]}" "$@"
