"""Decides from a folder's configuration files which checkpoint format it holds.

Up to four files may describe the quantization; those present are merged, and a contradiction
between them is refused. An unknown value is refused by name: nothing falls back to a default.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlinear_service.checkpoints import strict_json
from qlinear_service.errors import CheckpointError

__all__ = ["CONFIG_FILES", "Detected", "QuantizationConfig", "detect", "read_configuration"]

CONFIG_FILES = (
    "config.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
)
"""Where tools write the quantization settings, in the order in which they are trusted."""

_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_ALIASES = {"method": "quant_method", "w_bit": "bits", "q_group_size": "group_size"}
# Two files must agree on these. desc_act and static_groups are left out on purpose: tools write
# them wrongly, and the g_idx tensor tells the truth.
_DECISIVE = (
    "quant_method", "bits", "group_size", "sym", "checkpoint_format", "format", "packing_format",
    "is_marlin_format", "version", "zero_point", "pack_dtype", "dynamic", "config_groups",
)  # fmt: skip
_NEVER_LOADED = (
    "bitsandbytes", "hqq", "torchao", "eetq", "quanto", "aqlm", "higgs", "vptq", "fp8",
    "fbgemm_fp8", "mxfp4", "gguf", "bitnet", "spqr", "quark", "modelopt", "fp_quant",
)  # fmt: skip
_GPTQ_FORMATS = ("gptq", "gptq_v2")
_GPTQ_OTHER_FORMATS = ("gptq_p", "bitblas", "qqq", "exllama", "triton")
_AWQ_GEMM = ("gemm", "exllama", "exllamav2", "ipex")
"""Versions with the gemm layout: the last three choose kernels of other programs."""
_AWQ_OTHER = ("gemv", "gemv_fast", "llm-awq")
_COMPRESSED = ("pack-quantized", "mixed-precision")
_COMPRESSED_PLAIN = ("dense", "fakequant")
_COMPRESSED_OTHER = (
    "int-quantized", "naive-quantized", "float-quantized", "marlin-24", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "sparse-bitmask", "sparse-24-bitmask",
)  # fmt: skip
_PACKED_SUFFIXES = (
    ".qweight", ".weight_packed", ".B", ".W_q", ".quant_map", "._weight_qdata", ".SCB",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """The merged quantization settings of a folder; an absent key and null are the same."""

    path: Path
    """The file that was read first."""
    values: Mapping[str, Any]
    origins: Mapping[str, Path]
    """Which file each value came from."""

    def get(self, key: str) -> Any:
        """Return the value of `key`, or None."""
        return self.values.get(key)

    def error(self, key: str, problem: str) -> CheckpointError:
        """Return an error that names the file which holds `key`."""
        return CheckpointError(self.origins.get(key, self.path), problem)


@dataclass(frozen=True, slots=True)
class Detected:
    """What a folder holds."""

    family: str
    """Which reader loads it: "gptq", "awq", ..., "plain", or "" where none does."""
    label: str
    """What the files call the format, e.g. "gptq_v2"; goes into `Source.format`."""


def read_configuration(folder: Path) -> QuantizationConfig | None:
    """Return the folder's quantization settings; None where no file holds any.

    Raises:
        CheckpointError: a file is damaged, or two of them contradict each other.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Path] = {}
    first: Path | None = None
    for name in CONFIG_FILES:
        path = folder / name
        if not path.exists():
            continue
        settings = _settings(path)
        if settings is None:
            continue
        first = first or path
        for key, value in settings.items():
            if key in values and key in _DECISIVE and not _same(values[key], value):
                raise CheckpointError(
                    path,
                    f"says {key} = {value!r} but {origins[key].name} says {values[key]!r}; "
                    "correct one of the two files",
                )
            values.setdefault(key, value)
            origins.setdefault(key, path)
    return None if first is None else QuantizationConfig(first, values, origins)


def _settings(path: Path) -> dict[str, Any] | None:
    """Return the non-null quantization settings of one file under their usual names."""
    content: Any = strict_json.read_object(path)
    if path.name == "config.json":
        content = _quantization(content)
        if content is None:
            return None
        if not isinstance(content, dict):
            raise CheckpointError(
                path, f"quantization_config is {content!r}; expected a JSON object"
            )
    settings: dict[str, Any] = {}
    for key, value in content.items():
        name = _ALIASES.get(key, key)
        if value is None:
            continue
        if not _same(settings.setdefault(name, value), value):
            raise CheckpointError(
                path, f"says {settings[name]!r} and {value!r} for {name}; expected one value"
            )
    return settings


def _quantization(config: dict[str, Any]) -> Any:
    """Return what a model's configuration says of its quantization; None if nothing."""
    text = config.get("text_config")  # of models that see or hear, too
    places = (config, text) if isinstance(text, dict) else (config,)
    found = (place.get(key) for place in places for key in _QUANTIZATION_KEYS)
    return next((settings for settings in found if settings is not None), None)


def _same(one: object, other: object) -> bool:
    if isinstance(one, str) and isinstance(other, str):
        return one.lower() == other.lower()
    return one == other


def detect(folder: Path, config: QuantizationConfig | None, tensors: Mapping[str, Any]) -> Detected:
    """Return which format the folder holds.

    Raises:
        CheckpointError: the settings name an unknown method, format or version.
    """
    if config is None:
        # These two say all that must be known; GPTQ and AWQ do not: v1 or v2, which order.
        if any(name.endswith(".weight_packed") for name in tensors):
            return Detected("compressed-tensors", "pack-quantized")
        if any(name.endswith(".B") and f"{name[:-2]}.s" in tensors for name in tensors):
            return Detected("marlin", "marlin")
        packed = next((name for name in tensors if name.endswith(_PACKED_SUFFIXES)), None)
        if packed is not None:
            raise CheckpointError(
                folder,
                "is packed, but no file says how; expected quantization_config in config.json, or "
                f"one of {', '.join(CONFIG_FILES[1:])}",
                tensor=packed,
            )
        return Detected("plain", "plain weights")
    method = config.get("quant_method")
    if method is None:
        method = _legacy_method(config)
    if not isinstance(method, str):
        raise config.error("quant_method", f"quant_method is {method!r}; expected a string")
    match method.lower():
        case "gptq":
            return _gptq(config)
        case "auto-round" | "intel/auto-round":
            return _auto_round(config)
        case "awq":
            return _awq(config)
        case "marlin":
            return Detected("marlin", "marlin")
        case "compressed-tensors":
            return _compressed_tensors(config)
        case known if known in _NEVER_LOADED:
            return Detected("", known)
    raise config.error(
        "quant_method",
        f"quant_method is {method!r}, which is unknown; expected gptq, awq, auto-round, marlin or "
        "compressed-tensors",
    )


def _legacy_method(config: QuantizationConfig) -> str:
    """Name the method of old files, which have no quant_method, by the keys they do have."""
    if config.get("zero_point") is not None and config.get("version") is not None:
        return "awq"
    if config.get("bits") is not None and (
        config.get("desc_act") is not None or config.get("damp_percent") is not None
    ):
        return "gptq"
    if config.get("config_groups") is not None:
        return "compressed-tensors"
    raise config.error(
        "quant_method", "has no quant_method and no settings that tell the method; expected gptq"
    )


def _gptq(config: QuantizationConfig) -> Detected:
    labels = {key: config.get(key) for key in ("checkpoint_format", "format")}
    named = [label for label in labels.values() if label is not None]
    if len(named) == 2 and not _same(*named):
        raise config.error("format", f"contradicts itself: {labels}; expected one value")
    label = named[0] if named else "gptq"
    if config.get("is_marlin_format") is True or label == "marlin":
        return Detected("marlin", "marlin")
    if label in _GPTQ_FORMATS:
        return Detected("gptq", label)
    if label in _GPTQ_OTHER_FORMATS:
        return Detected("", f"GPTQ in the format {label}")
    raise config.error(
        "checkpoint_format",
        f"checkpoint_format is {label!r}, which is unknown; expected {' or '.join(_GPTQ_FORMATS)}",
    )


def _auto_round(config: QuantizationConfig) -> Detected:
    packing = config.get("packing_format")
    match packing:
        case "auto_round:auto_gptq":
            return Detected("gptq", packing)
        case "auto_round:auto_awq":
            return Detected("awq", packing)
    raise config.error(
        "packing_format",
        f"packing_format is {packing!r}, which is not supported; expected "
        "auto_round:auto_gptq or auto_round:auto_awq",
    )


def _awq(config: QuantizationConfig) -> Detected:
    keys = ("version", "format", "checkpoint_format")
    versions = {key: config.get(key) for key in keys if config.get(key) is not None}
    named = {str(version).lower() for version in versions.values()} or {"gemm"}
    if len(named) > 1:
        raise config.error("version", f"contradicts itself: {versions}; expected one value")
    version = named.pop()
    if version in _AWQ_GEMM:
        return Detected("awq", "awq_gemm")
    if version == "marlin":
        return Detected("marlin", "awq_marlin")
    if version in _AWQ_OTHER:
        return Detected("", f"AWQ, version {version}")
    raise config.error("version", f"version is {version!r}, which is unknown; expected gemm")


def _compressed_tensors(config: QuantizationConfig) -> Detected:
    label = config.get("format")
    if label in _COMPRESSED:
        return Detected("compressed-tensors", str(label))
    if label in _COMPRESSED_PLAIN:
        return Detected("plain", f"plain weights (compressed-tensors, {label})")
    if label in _COMPRESSED_OTHER:
        return Detected("", f"compressed-tensors, {label}")
    raise config.error(
        "format", f"format is {label!r}, which is unknown; expected {_COMPRESSED[0]}"
    )
