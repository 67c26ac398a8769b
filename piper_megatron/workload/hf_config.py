"""A Hugging Face `config.json` that remembers which of its keys were read."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from piper_megatron.errors import WorkloadError

# keys that say nothing of a model's shape or cost, and so need no reading
WITHOUT_BEARING = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "attn_scale",
        "attn_temperature_tuning",
        "auto_map",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "ep_size",
        "eos_token_id",
        "floor_scale",
        "for_llm_compression",
        "for_llm_compressor",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "language",
        "max_length",
        "model_type",
        "name_or_path",
        "num_return_sequences",
        "output_router_logits",
        "pad_token_id",
        "problem_type",
        "quantization_config",
        "return_dict",
        "rope_interleave",
        "router_jitter_noise",
        "sep_token_id",
        "task_specific_params",
        "torch_dtype",
        "transformers_version",
        "unsloth_version",
        "use_cache",
    }
)


class HuggingFaceConfig:
    """Typed access to the keys of a configuration; what nobody asked for is not understood."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        """Wraps a configuration.

        Args:
            values: its keys.
            origin: what error messages call it.
        """
        self._values = values
        self._origin = origin
        self._read: set[str] = set()

    def error(self, problem: str) -> WorkloadError:
        """An error about this configuration."""
        return WorkloadError(f"{self._origin}: {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        """A key's value, or the default where it is absent or null."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def skip(self, *keys: str) -> None:
        """Takes keys as read that other keys say already."""
        self._read.update(keys)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number; an error where it is missing without a default."""
        value = self.get(key, default)
        if value is None:
            raise self.error(f"'{key}' is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"'{key}' must be a positive whole number, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number that is not negative; an error where it is missing without a default."""
        value = self.get(key, default)
        if value is None:
            raise self.error(f"'{key}' is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
            raise self.error(f"'{key}' must be a number that is not negative, got {value!r}")
        return value

    def switch(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"'{key}' must be true or false, got {value!r}")
        return value

    def part(self, *keys: str) -> "HuggingFaceConfig":
        """Nested objects as one configuration, later ones first; empty where all are absent."""
        merged: dict[str, Any] = {}
        for key in keys:
            value = self.get(key, {})
            if not isinstance(value, Mapping):
                raise self.error(f"'{key}' must be an object, got {value!r}")
            merged |= value
        return HuggingFaceConfig(merged, f"{self._origin}, {' or '.join(keys)}")

    def per_layer(self, key: str, length: int) -> Sequence[Any] | None:
        """A list with an entry for each layer; None where absent or empty."""
        value = self.get(key)
        if not value:
            return None
        if not isinstance(value, list) or len(value) != length:
            raise self.error(f"'{key}' must list {length} layers, got {value!r}")
        return value

    def indices(self, key: str) -> frozenset[int]:
        """A list of layers by number, from 0; empty where absent."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(type(layer) is int for layer in value):
            raise self.error(f"'{key}' must be a list of layer numbers, got {value!r}")
        return frozenset(value)

    def choice(self, key: str, *known: Any, default: Any) -> Any:
        """A value of which only some have a counterpart in Megatron."""
        value = self.get(key, default)
        if value not in known:
            understood = " or ".join(json.dumps(each) for each in known)
            raise self.error(
                f"'{key}' is {json.dumps(value)}; Megatron's arguments cover {understood} alone"
            )
        return value

    def again(self) -> "HuggingFaceConfig":
        """The same configuration, of which nothing was read."""
        return HuggingFaceConfig(self._values, self._origin)

    def unread(self) -> set[str]:
        """Keys that nobody read though they may change the model.

        A key that is null, false or empty switches nothing on.
        """
        return {
            key
            for key, value in self._values.items()
            if key not in self._read | WITHOUT_BEARING
            and not (value is None or value is False or value in ([], {}, ""))
        }

    def refuse_unread(self) -> None:
        """Raises an error that lists the keys that nobody read."""
        if unread := self.unread():
            raise self.error(
                f"keys not understood: {', '.join(sorted(unread))}; give the model as Megatron "
                "arguments, or remove keys that do not change it"
            )


def load_config(source: str | Path | Mapping[str, Any]) -> HuggingFaceConfig:
    """A configuration from its file, the folder that holds its `config.json`, or a mapping.

    Raises:
        WorkloadError: the file cannot be read or is not a JSON object.
    """
    if isinstance(source, Mapping):
        return HuggingFaceConfig(source, "config.json")
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise WorkloadError(f"cannot read {path}: {reason}") from None
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}") from None
    if not isinstance(values, dict):
        raise WorkloadError(f"{path}: holds no JSON object")
    return HuggingFaceConfig(values, str(path))
