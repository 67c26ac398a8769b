"""A Megatron command that trains a very small mixture-of-experts model in seconds."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "pretrain_moe.py"


def tiny_command(*more: str, iterations: int = 5) -> list[str]:
    """Arguments of `SCRIPT`: 4 layers, 4 experts top-2, mock data; `more` comes last and wins."""
    return [
        *"--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48".split(),
        *"--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall".split(),
        *"--swiglu --disable-bias-linear --normalization RMSNorm".split(),
        *"--untie-embeddings-and-output-weights --position-embedding-type rope".split(),
        *"--seq-length 32 --max-position-embeddings 32".split(),
        *"--micro-batch-size 1 --global-batch-size 8 --lr 1e-2 --log-interval 1".split(),
        *f"--train-iters {iterations} --eval-iters 0 --eval-interval 1000".split(),
        *"--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0".split(),
        *more,
    ]
