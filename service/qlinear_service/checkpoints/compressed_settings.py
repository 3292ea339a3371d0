"""What the configuration of a compressed-tensors checkpoint says; what is not loaded is refused.

Which modules a group means is told by class names and regular expressions. Those are never run:
the tensors of a module say what it has, and must agree with one of the groups.
"""

from typing import Any, NamedTuple

from qlinear_service.checkpoints.detect import QuantizationConfig
from qlinear_service.errors import CheckpointError

__all__ = ["Scheme", "read_schemes"]

_PRESETS = {"W4A16": (4, True), "W4A16_ASYM": (4, False), "W8A16": (8, True)}
_STRATEGIES = ("group", "channel", "tensor")


class Scheme(NamedTuple):
    """How the modules of one group are quantized."""

    bits: int
    group_size: int | None
    """-1 is one group; None where the configuration does not say."""
    symmetric: bool
    ordered: bool = False
    """Act-order: the tensors say of each input feature which group it is in."""

    def __str__(self) -> str:
        size = "" if self.group_size is None else f", group_size {self.group_size}"
        order = ", act-order" if self.ordered else ""
        return f"{self.bits} bits{size}, {'symmetric' if self.symmetric else 'asymmetric'}{order}"

    def describes(self, bits: int, groups: int, k: int, *, symmetric: bool, listed: bool) -> bool:
        """Say whether a module with so many groups along its k features may belong to it.

        Args:
            bits: of one code.
            groups: that the module has scales for.
            k: input features.
            symmetric: it has no zero points.
            listed: it says of each feature which group that is in; otherwise all are equally long.
        """
        size = self.group_size
        expected = 1 if size is None or size == -1 else -(-k // size)
        even = not self.ordered and (size is None or groups * size == k)
        same_groups = (size is None or groups == expected) and (listed or groups == 1 or even)
        return (self.bits, self.symmetric) == (bits, symmetric) and same_groups


def read_schemes(config: QuantizationConfig | None) -> tuple[Scheme, ...]:
    """Return the groups of a configuration; none where there is no configuration.

    Raises:
        CheckpointError: a setting is malformed or not loaded.
    """
    if config is None:
        return ()
    status = config.get("quantization_status")
    if status not in (None, "compressed", "frozen"):
        raise config.error(
            "quantization_status", f"quantization_status is {status!r}; expected 'compressed'"
        )
    for key in ("sparsity_config", "transform_config"):
        value = config.get(key)
        harmless = isinstance(value, dict) and value.get("format") in ("dense",)
        if value and not harmless:
            raise config.error(key, f"{key} is set, which changes what a layer computes")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise config.error(
            "config_groups", f"config_groups is {groups!r}; expected a JSON object with entries"
        )
    return tuple(dict.fromkeys(_scheme(config, name, group) for name, group in groups.items()))


def _scheme(config: QuantizationConfig, name: str, group: Any) -> Scheme:
    if isinstance(group, list) and name.upper() in _PRESETS:
        bits, symmetric = _PRESETS[name.upper()]
        return Scheme(bits, None, symmetric)
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise _error(config, name, f"is {group!r}; expected an object with weights")
    for key in ("input_activations", "output_activations"):
        if group.get(key) is not None:
            raise _error(config, name, f"quantizes activations ({key}), which is not loaded")
    if group.get("format") not in (None, "pack-quantized"):
        raise _error(config, name, f"has format {group['format']!r}; pack-quantized is loaded")
    weights = group["weights"]
    bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    if isinstance(bits, bool) or bits not in (4, 8):
        raise _error(config, name, f"has num_bits {bits!r}; 4 and 8 are loaded")
    if kind not in (None, "int") or weights.get("dynamic") not in (None, False):
        raise _error(config, name, f"has type {kind!r}; weights of type int are loaded")
    if strategy not in (None, *_STRATEGIES):
        raise _error(
            config, name, f"has strategy {strategy!r}; {', '.join(_STRATEGIES)} are loaded"
        )
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise _error(config, name, f"has symmetric {symmetric!r}; expected true or false")
    ordered = weights.get("actorder") in (True, "group", "dynamic")
    return Scheme(int(bits), _group_size(config, name, weights, strategy), symmetric, ordered)


def _group_size(
    config: QuantizationConfig, name: str, weights: dict[str, Any], strategy: str | None
) -> int | None:
    size = weights.get("group_size")
    if strategy in ("channel", "tensor") or (strategy is None and size is None):
        return -1
    if isinstance(size, int) and not isinstance(size, bool) and (size == -1 or size > 0):
        return size
    raise _error(config, name, f"has group_size {size!r}; expected -1 or more than 0")


def _error(config: QuantizationConfig, name: str, problem: str) -> CheckpointError:
    return config.error("config_groups", f"config_groups.{name} {problem}")
