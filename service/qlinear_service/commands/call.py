"""`qlinear call`: sends one .npy file to a running server and writes the answer to another.

Needs only the base install. A .npy file cannot name bfloat16: numpy saves such an array as
two-byte void ("V2"), which is read as bfloat16 here and written so for bfloat16 answers; get it
back with np.load(path).view(ml_dtypes.bfloat16).
"""

import argparse
import io
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlinear_client import CallError, Client
from qlinear_service.errors import QlinearError

try:
    import ml_dtypes
except ImportError:  # only bfloat16 files need it
    ml_dtypes = None  # type: ignore[assignment]

__all__ = ["add_arguments", "run"]

STREAM = "-"
NPY_MAGIC = b"\x93NUMPY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `qlinear call`."""
    parser.add_argument("layer", metavar="LAYER", help='"<model>/<module>", or "<module>"')
    parser.add_argument(
        "--in",
        dest="input",
        required=True,
        metavar="X.npy",
        help="activations [..., k], float16, bfloat16 (saved as V2) or float32; - reads stdin",
    )
    parser.add_argument(
        "--out", required=True, metavar="Y.npy", help="results [..., n]; - writes stdout"
    )
    parser.add_argument("--target", required=True, metavar="HOST:PORT", help="the server")
    parser.add_argument(
        "--output-dtype",
        choices=["float16", "bfloat16", "float32"],
        help="dtype of the results (default: that of the activations)",
    )
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="SECONDS", help="to wait (default: 5)"
    )


def run(args: argparse.Namespace) -> int:
    """Send the call and write its answer; return 0.

    Raises:
        QlinearError: a file or the call failed, in one sentence.
    """
    x = _load(args.input)
    try:
        with Client(args.target, timeout=args.timeout) as client:
            y = client.matmul(args.layer, x, output_dtype=args.output_dtype)
    except CallError as error:
        raise QlinearError(f"{args.target}: {error.code.name}: {error}") from error
    _save(args.out, y)
    shapes = f"{list(x.shape)} {x.dtype} -> {list(y.shape)} {y.dtype}"
    print(f"{args.layer}: {shapes}", file=sys.stderr)
    return 0


def _load(path: str) -> npt.NDArray[Any]:
    try:
        # Through memory, because np.load has to seek and a pipe cannot.
        raw = sys.stdin.buffer.read() if path == STREAM else Path(path).read_bytes()
    except OSError as error:
        raise QlinearError(f"{path}: {error.strerror}") from error
    try:
        x = np.load(io.BytesIO(raw), allow_pickle=False)
    except (ValueError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        # Not numpy's own words: they advise to load pickles, which can run code.
        raise QlinearError(f"{path}: {_problem(raw)}; save one array with np.save") from error
    if not isinstance(x, np.ndarray):
        raise QlinearError(f"{path}: an archive of several arrays; expected one array (np.save)")
    return _as_bfloat16(path, x) if x.dtype == np.dtype("V2") else x


def _problem(raw: bytes) -> str:
    """Say what is wrong with bytes that numpy does not load."""
    if not raw.startswith(NPY_MAGIC):
        return "not a .npy file"
    return "not a .npy file of numbers, or not all of one"


def _as_bfloat16(path: str, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if ml_dtypes is None:
        raise QlinearError(f"{path}: bfloat16 needs ml_dtypes: pip install 'qlinear[bf16]'")
    return x.view(ml_dtypes.bfloat16)


def _save(path: str, y: npt.NDArray[Any]) -> None:
    try:
        if path == STREAM:
            np.save(sys.stdout.buffer, y, allow_pickle=False)
        else:
            # An open file, because np.save appends ".npy" to names that lack it.
            with open(path, "wb") as file:
                np.save(file, y, allow_pickle=False)
    except OSError as error:
        raise QlinearError(f"{path}: {error.strerror}") from error
