"""What the configuration of a GPTQ or AWQ checkpoint says, everything that is not loaded refused.

Such a file may have other settings for some modules, chosen by regular expressions. Those are never
run: each module's tensors say which of the settings it has, and must agree with one of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qlinear_service.checkpoints.detect import QuantizationConfig
from qlinear_service.errors import CheckpointError
from qlinear_service.kernels import layout
from qlinear_service.layers import Source

__all__ = ["Setting", "Settings", "read_settings"]

# Settings that change what a layer computes, with the one value that does not.
_NEUTRAL = {"pack_dtype": "int32", "data_type": "int", "act_bits": 16}
_REFUSED_WHEN_SET = ("adapter", "rotation")
_OVERRIDES = ("dynamic", "extra_config")  # of GPTQModel and of AutoRound


@dataclass(frozen=True, slots=True)
class Setting:
    """What the modules of one kind have in common."""

    bits: int
    group_size: int
    """As the file says it: -1 or any positive number."""
    symmetric: bool | None
    """None where the file does not say."""

    def __str__(self) -> str:
        return f"{self.bits} bits, group_size {self.group_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a checkpoint."""

    choices: tuple[Setting, ...]
    """The one of most modules, then those of others; each differs from those before it."""
    ordered: bool
    """Act-order: input features are not in groups of consecutive ones."""
    quantizer: str
    """The tool as the file names it."""
    source: Source

    def __str__(self) -> str:
        return "; ".join(map(str, self.choices))


def read_settings(
    config: QuantizationConfig, *, label: str, method: str, symmetric: bool | None
) -> Settings:
    """Return the settings of a GPTQ or AWQ checkpoint.

    Args:
        config: the merged configuration.
        label: what the files call the format, e.g. "gptq_v2".
        method: how the codes were chosen, as far as the format says.
        symmetric: what the configuration says of most modules.

    Raises:
        CheckpointError: a setting is malformed or not loaded.
    """
    for key, neutral in _NEUTRAL.items():
        value = config.get(key)
        if value is not None and value != neutral:
            raise config.error(key, f"{key} is {value!r}; only {neutral!r} is loaded")
    for key in _REFUSED_WHEN_SET:
        if config.get(key):
            raise config.error(key, f"{key} is set, which is not loaded")
    base = Setting(_integer(config, "bits"), _integer(config, "group_size"), symmetric)
    if base.bits not in layout.BITS:
        raise config.error("bits", f"bits is {base.bits}; 4 and 8 are loaded")
    if base.group_size < -1 or base.group_size == 0:
        problem = f"group_size is {base.group_size}; expected -1 or more than 0"
        raise config.error("group_size", problem)
    choices = dict.fromkeys([base, *_overrides(config, base)])
    return Settings(
        choices=tuple(choices),
        ordered=config.get("desc_act") is True and config.get("static_groups") is not True,
        quantizer=_quantizer(config.get("meta")),
        source=_source(config, label, method),
    )


def _integer(config: QuantizationConfig, key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise config.error(key, f"{key} is {value!r}; expected an integer")
    return value


def _overrides(config: QuantizationConfig, base: Setting) -> Iterator[Setting]:
    """Yield the settings of modules that differ; what is no setting of ours fits no tensors."""
    for key in _OVERRIDES:
        overrides = config.get(key) or {}
        if not isinstance(overrides, dict):
            raise config.error(key, f"{key} is {overrides!r}; expected a JSON object")
        for pattern, override in overrides.items():
            if pattern.startswith("-:"):
                continue  # not quantized, and the tensors say that as well
            if not isinstance(override, dict):
                raise _not_an_object(config, key, pattern, override)
            sym = override.get("sym")
            yield Setting(
                _number(override.get("bits"), base.bits),
                _number(override.get("group_size"), base.group_size),
                sym if isinstance(sym, bool) else base.symmetric,
            )


def _not_an_object(
    config: QuantizationConfig, key: str, pattern: str, override: object
) -> CheckpointError:
    return config.error(key, f"{key} has {override!r} for {pattern!r}; expected a JSON object")


def _number(value: object, default: int) -> int:
    """Return an integer that a file holds; anything else is no setting, as 0 is none."""
    if value is None:
        return default
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _source(config: QuantizationConfig, label: str, method: str) -> Source:
    provider = config.get("provider")
    if provider == "auto-round" or label.startswith("auto_round"):
        version = config.get("autoround_version")
        tool = f"auto-round:{version}" if version else "auto-round"
        return Source(tool=tool, format=label, method="auto-round")
    return Source(tool=_quantizer(config.get("meta")), format=label, method=method)


def _quantizer(meta: Any) -> str:
    """Return meta.quantizer, which is a string or a list of "tool:version"."""
    quantizer = meta.get("quantizer") if isinstance(meta, dict) else None
    if isinstance(quantizer, list):
        return ", ".join(map(str, quantizer))
    return quantizer if isinstance(quantizer, str) else ""
