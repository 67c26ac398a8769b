# What the four X-MoE comparison models share (arXiv:2508.13337); sourced by xmoe_*_frontier.sbatch.
#
# The paper counts parameters in units of 2^30, with two matrices an expert and without embeddings:
# layers * (4 hidden^2 + 2 experts * hidden * expert width).

DATA_PATH=${DATA_PATH:-} # prefix of a .bin/.idx pair in GPT-2 tokens; without it, random tokens

MODEL_ARGS+=(
    --position-embedding-type rope
    --normalization LayerNorm
    --disable-bias-linear # experts are two matrices with GELU between them, not a gated three
    --attention-dropout 0
    --hidden-dropout 0
)
MOE_ARGS+=(
    --moe-layer-freq 1 # every layer
    --moe-expert-capacity-factor 1.25
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0.01
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
)
DATA_ARGS=(
    --tokenizer-type NullTokenizer
    --vocab-size 50257
)
if [ -n "$DATA_PATH" ]; then
    DATA_ARGS+=(--data-path "$DATA_PATH" --split 99,1,0)
else
    DATA_ARGS+=(--mock-data)
fi
TRAIN_ARGS+=(
    --fp16
    --initial-loss-scale 65536
    --use-distributed-optimizer
    --no-gradient-accumulation-fusion # needs a kernel of NVIDIA's apex
    --train-iters 50
    --lr 1e-4
    --lr-warmup-iters 10
    --clip-grad 1
    --log-interval 1
    --log-throughput
    --eval-interval 1000
    --eval-iters 0
)
