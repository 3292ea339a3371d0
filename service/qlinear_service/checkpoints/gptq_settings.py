"""What a GPTQ checkpoint's configuration says, with everything that is not loaded refused by name.

Only settings are judged here; `gptq` compares them with the tensors, which have the last word.
"""

from dataclasses import dataclass
from typing import Any

from qlinear_service.checkpoints.detect import QuantizationConfig
from qlinear_service.layers import Source

__all__ = ["GptqSettings", "read_settings"]

# Settings that change what a layer computes, with the one value that does not.
_NEUTRAL = {"pack_dtype": "int32", "data_type": "int", "act_bits": 16}
_REFUSED_WHEN_SET = ("adapter", "rotation", "extra_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqSettings:
    """The settings that matter for unpacking."""

    bits: int
    group_size: int
    """As the file says it: -1 or any positive number."""
    symmetric: bool | None
    """None where the file does not say."""
    zeros_minus_one: bool
    """True for v1, which stores zero points minus one."""
    source: Source

    @property
    def codes_per_word(self) -> int:
        """Codes in one 32-bit word."""
        return 32 // self.bits


def read_settings(config: QuantizationConfig, *, label: str) -> GptqSettings:
    """Return the settings of a GPTQ checkpoint.

    Args:
        config: the merged configuration.
        label: what the files call the format: "gptq", "gptq_v2" or "auto_round:auto_gptq".

    Raises:
        CheckpointError: a setting is malformed or not loaded by this version.
    """
    bits = _integer(config, "bits")
    if bits != 4:
        raise config.error("bits", f"bits is {bits}; this version loads 4")
    group_size = _integer(config, "group_size")
    if group_size < -1 or group_size == 0:
        raise config.error("group_size", f"group_size is {group_size}; expected -1 or more than 0")
    symmetric = config.get("sym")
    if symmetric is not None and not isinstance(symmetric, bool):
        raise config.error("sym", f"sym is {symmetric!r}; expected true or false")
    if symmetric is False:
        raise config.error(
            "sym",
            "sym is false: asymmetric; this version loads symmetric only: quantize with sym=true",
        )
    _refuse_overrides(config)
    return GptqSettings(
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        zeros_minus_one=label != "gptq_v2",
        source=_source(config, label),
    )


def _integer(config: QuantizationConfig, key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise config.error(key, f"{key} is {value!r}; expected an integer")
    return value


def _refuse_overrides(config: QuantizationConfig) -> None:
    for key, neutral in _NEUTRAL.items():
        value = config.get(key)
        if value is not None and value != neutral:
            raise config.error(key, f"{key} is {value!r}; this version loads {neutral!r} only")
    for key in _REFUSED_WHEN_SET:
        if config.get(key):
            raise config.error(key, f"{key} is set, which this version does not load")
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise config.error("dynamic", f"dynamic is {dynamic!r}; expected a JSON object")
    for pattern, override in dynamic.items():
        # "-:" only says which modules were left alone, and the tensors say that as well.
        if not pattern.startswith("-:"):
            raise config.error(
                "dynamic",
                f"dynamic overrides {pattern!r} with {override!r}; this version loads one setting "
                "for all modules",
            )


def _source(config: QuantizationConfig, label: str) -> Source:
    provider = config.get("provider")
    if provider == "auto-round" or label.startswith("auto_round"):
        version = config.get("autoround_version")
        tool = f"auto-round:{version}" if version else "auto-round"
        return Source(tool=tool, format=label, method="auto-round")
    return Source(tool=_quantizer(config.get("meta")), format=label, method="gptq")


def _quantizer(meta: Any) -> str:
    """Return meta.quantizer, which is a string or a list of "tool:version"."""
    quantizer = meta.get("quantizer") if isinstance(meta, dict) else None
    if isinstance(quantizer, list):
        return ", ".join(map(str, quantizer))
    return quantizer if isinstance(quantizer, str) else ""
