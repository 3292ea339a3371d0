"""Checkpoint folders: which format they hold, and their layers one at a time.

`open_checkpoint` is the only entrance. A format is one module with `describe` and `read`, and one
line in `_READERS`; files, configuration and detection are shared by all formats.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from qlinear_service.checkpoints import awq, compressed_tensors, gptq, marlin, strict_json
from qlinear_service.checkpoints.checkpoint import Checkpoint, Module, Skipped
from qlinear_service.checkpoints.detect import CONFIG_FILES, detect, read_configuration
from qlinear_service.checkpoints.opened import Opened, by_module
from qlinear_service.checkpoints.plain import PlainOptions, plain_modules, why_not_linear
from qlinear_service.checkpoints.tensor_files import INDEX_SUFFIX, WEIGHTS_SUFFIX, TensorFiles
from qlinear_service.errors import CheckpointError
from qlinear_service.log_values import event

__all__ = [
    "WEIGHTS_SUFFIX",
    "Checkpoint",
    "Module",
    "PlainOptions",
    "Skipped",
    "checked_model_name",
    "is_checkpoint_file",
    "open_checkpoint",
]

logger = logging.getLogger(__name__)

_Reader = tuple[Callable[[Opened], str], Callable[[Opened], Iterator[Module]]]
_READERS: dict[str, _Reader] = {
    "gptq": (gptq.describe, gptq.read),
    "awq": (awq.describe, awq.read),
    "compressed-tensors": (compressed_tensors.describe, compressed_tensors.read),
    "marlin": (marlin.describe, marlin.read),
    "plain": (lambda opened: opened.found.label, lambda opened: iter(())),
}
_LOADED = (
    "GPTQ, AWQ (gemm), compressed-tensors (pack-quantized), AutoRound, Marlin and plain "
    "weights are loaded"
)
# A tensor with one of these names belongs to a quantized module, and to nothing else.
_ONLY_BESIDE_CODES = {
    "qzeros": "qweight",
    "g_idx": "qweight",
    "weight_scale": "weight_packed",
    "weight_zero_point": "weight_packed",
    "weight_g_idx": "weight_packed",
    "weight_shape": "weight_packed",
}
_ONLY_CODES = ("qweight", "weight_packed")
_CODES = (*_ONLY_CODES, "B")  # the last one is something else where there is no "s" beside it


def open_checkpoint(
    path: Path, *, model: str | None = None, plain: PlainOptions | None = None
) -> Checkpoint:
    """Open the checkpoint folder at `path`.

    Args:
        path: the folder.
        model: name of the model; the folder's name if None.
        plain: what becomes of unquantized layers.

    Raises:
        CheckpointError: it is damaged, contradicts itself, or holds a format that is not loaded.
    """
    if path.is_file():
        raise CheckpointError(path, "is a file; expected the checkpoint's folder")
    config = read_configuration(path)
    files = TensorFiles(path)
    found = detect(path, config, files.tensors)
    if found.family not in _READERS:
        where = path if config is None else config.path
        raise CheckpointError(where, f"the checkpoint holds {found.label}; {_LOADED}")
    opened = Opened(
        files=files,
        modules=by_module(files.tensors),
        config=config,
        found=found,
        model=checked_model_name(path.resolve().name if model is None else model, path),
        model_type=_model_type(path),
    )
    describe, read = _READERS[found.family]
    modules = {module.spec.module: module for module in read(opened)}
    if found.family != "plain" and not modules:
        raise CheckpointError(
            path, f"is said to hold {found.label}, but no tensor of it does; {_LOADED}"
        )
    _check_pairs(opened, modules)
    modules |= {
        module.spec.module: module for module in plain_modules(opened, plain or PlainOptions())
    }
    return Checkpoint(
        path=path,
        model=opened.model,
        format=describe(opened),
        modules=[modules[name] for name in opened.modules if name in modules],
        skipped=[
            *_skipped(opened, modules),
            *(Skipped(name, "the index does not place it there") for name in files.unindexed),
        ],
    )


def _model_type(folder: Path) -> str:
    path = folder / "config.json"
    value = strict_json.read_object(path).get("model_type") if path.exists() else None
    return value if isinstance(value, str) else ""


def _check_pairs(opened: Opened, read: Mapping[str, Module]) -> None:
    """Refuse modules with two weights, of another format, and parts of them without codes."""
    for name, tensors in opened.modules.items():
        codes = next((suffix for suffix in _CODES if suffix in tensors), None)
        if codes is not None and "weight" in tensors:
            raise CheckpointError(
                tensors["weight"].path,
                f"stands beside a {codes} of the same module; expected one of the two",
                tensor=f"{name}.weight",
            )
        if name not in read and (codes in _ONLY_CODES or (codes == "B" and "s" in tensors)):
            raise CheckpointError(
                tensors[codes].path,
                f"is not part of the format that the rest was taken for ({opened.found.label}); "
                "one folder holds one format: quantize again, all of it alike",
                tensor=f"{name}.{codes}",
            )
        for suffix, needed in _ONLY_BESIDE_CODES.items():
            if suffix in tensors and codes is None:
                raise CheckpointError(
                    tensors[suffix].path,
                    f"has no {name}.{needed} beside it; the file is incomplete",
                    tensor=f"{name}.{suffix}",
                )


def _skipped(opened: Opened, modules: dict[str, Module]) -> Iterator[Skipped]:
    """Yield every tensor that is part of no served layer, and why."""
    for name, tensors in opened.modules.items():
        module = modules.get(name)
        for suffix, info in tensors.items():
            full = f"{name}.{suffix}" if name else suffix
            if module is None:
                reason = why_not_linear(opened, name, tensors)
                if reason is None:
                    reason = "not quantized in the checkpoint; see --unquantized"
                yield Skipped(full, f"{info}: {reason}")
            elif suffix not in module.tensors:
                event(logger, logging.WARNING, "tensor_ignored", tensor=full, reason="foreign")
                yield Skipped(full, f"{info}: not part of the format, ignored")


def checked_model_name(name: str, path: Path) -> str:
    """Return `name` if a model can be called that.

    Raises:
        CheckpointError: it is empty, has control characters, or a "/", which separates the
            model's name from the module's.
    """
    if not name or "/" in name or not name.isprintable():
        raise CheckpointError(
            path,
            f"its model would be called {name!r}; expected a name without '/' (qlinear pack --name "
            "gives another)",
        )
    return name


def is_checkpoint_file(name: str) -> bool:
    """Say whether a file of that name marks its folder as a checkpoint."""
    return name in CONFIG_FILES or name.endswith(INDEX_SUFFIX)
