"""Real sentence embeddings with every linear layer answered by a qlinear server.

Starts a server with the sample model (or uses --target), lets one client task per sentence run
concurrently, and checks everything: each layer's answer against a local reference made from the
checkpoint's own bits, and each element of each embedding. Exits with 1 if anything is wrong.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from minilm.encoder import Encoder, Sentence, load_sentences
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from qlinear_client import AsyncClient

MODEL = Path(__file__).parent / "models" / "all-MiniLM-L6-v2"

# Rounding x and y of every layer to float16 moves an element by 1e-4; one wrong row of one weight
# moves it by 3e-3. A cosine would hide that: a zero point off by one leaves it at 0.9993.
EMBEDDING_TOLERANCE = 3e-4


def local_weights() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return weight float64 [n, k] and bias [n] of each layer, unpacked here, bit by bit.

    GPTQ, 4 bits: word [r, n] holds the codes of k = 8 r .. 8 r + 7, lowest bits first.
    """
    tensors = load_file(MODEL / "model.safetensors")
    weights = {}
    for name in sorted(key.removesuffix(".qweight") for key in tensors if key.endswith("qweight")):
        words = tensors[f"{name}.qweight"]
        codes = torch.stack([words >> shift & 0xF for shift in range(0, 32, 4)], dim=1)
        scales = tensors[f"{name}.scales"].double().repeat_interleave(128, dim=0)
        weight = (codes.reshape(-1, words.shape[1]).double() - 8) * scales
        weights[name] = (weight.T, tensors[f"{name}.bias"].double())
    return weights


@dataclass
class LayerCheck:
    """What the answers of one kind of layer looked like."""

    calls: int = 0
    rows: int = 0
    worst: float = 0.0
    """Largest error in units of its bound; above 1 is wrong."""


@dataclass
class CheckedServer:
    """Asks the server for layers and compares each answer with the local reference."""

    client: AsyncClient
    weights: dict[str, tuple[torch.Tensor, torch.Tensor]]
    checks: dict[str, LayerCheck] = field(default_factory=dict)

    async def linears(self, names: list[str], x: torch.Tensor) -> list[torch.Tensor]:
        """Send x in float16 and return the answers in float32."""
        half = x.half()
        answers = await self.client.matmul(names, half)
        for name, answer in zip(names, answers, strict=True):
            self._check(name, half.double(), answer)
        return [answer.float() for answer in answers]

    def _check(self, name: str, x: torch.Tensor, answer: torch.Tensor) -> None:
        weight, bias = self.weights[name]
        expected = x @ weight.T + bias
        # float32 sums of k products and a bias, then one rounding to float16.
        spread = x.abs() @ weight.abs().T + bias.abs()
        bound = (x.shape[1] + 1) * 2**-24 * spread + 2**-11 * expected.abs() + 2**-25
        kind = name.split(".", 3)[3]
        check = self.checks.setdefault(kind, LayerCheck())
        check.calls += 1
        check.rows += len(x)
        error = (answer.double() - expected).abs() / bound
        check.worst = max(check.worst, error.nan_to_num(nan=float("inf")).max().item())


@contextmanager
def running_server() -> Iterator[str]:
    """Start `qlinear serve` on a free port and yield its address; stop it at the end."""
    command = [sys.executable, "-m", "qlinear_service", "serve", str(MODEL)]
    command += ["--port", "0", "--metrics-port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith("ready on "):
                yield line.split()[-1]
                break
        else:
            sys.exit("the server ended before it was ready")
    finally:
        server.terminate()
        if server.wait(timeout=30) != 0:
            sys.exit(f"the server ended with {server.returncode}")


async def embed_all(
    target: str, sentences: list[Sentence]
) -> tuple[list[torch.Tensor], CheckedServer]:
    """Embed all sentences at once, each in its own task."""
    encoder = Encoder()
    async with AsyncClient(target, timeout=60.0) as client:
        server = CheckedServer(client, local_weights())
        embeddings = await asyncio.gather(
            *(encoder.encode(sentence.token_ids, server.linears) for sentence in sentences)
        )
    return embeddings, server


def report(
    sentences: list[Sentence], embeddings: list[torch.Tensor], server: CheckedServer, seconds: float
) -> bool:
    """Print what came out; return whether all of it is right."""
    console = Console()
    table = Table("layer", "calls", "rows", "worst error / bound", title="Layers")
    for kind, check in server.checks.items():
        table.add_row(kind, str(check.calls), str(check.rows), f"{check.worst:.3f}")
    console.print(table)
    table = Table("group", "paraphrases", "unrelated", "max |difference|", title="Embeddings")
    worst = 0.0
    for group in dict.fromkeys(sentence.group for sentence in sentences):
        members = [i for i, sentence in enumerate(sentences) if sentence.group == group]
        first, second = (i for i in members if sentences[i].role == "paraphrase")
        (other,) = (i for i in members if sentences[i].role != "paraphrase")
        differences = [(embeddings[i] - sentences[i].reference).abs().max().item() for i in members]
        # max() would drop a NaN; this keeps it, and the comparison below then fails.
        worst = max([worst, *(d if d == d else float("inf") for d in differences)])
        table.add_row(
            group,
            f"{embeddings[first] @ embeddings[second]:.3f}",
            f"{embeddings[first] @ embeddings[other]:.3f}",
            f"{max(differences):.1e}",
        )
    console.print(table)
    layers_right = all(check.worst <= 1.0 for check in server.checks.values())
    kinds = sum(check.calls for check in server.checks.values())
    console.print(
        f"{len(sentences)} sentences, {kinds} layer answers in {seconds:.2f} s; largest difference "
        f"of an element {worst:.1e} (allowed {EMBEDDING_TOLERANCE:.0e})"
    )
    return layers_right and worst <= EMBEDDING_TOLERANCE


def main() -> int:
    """Run the demonstration; 0 if every number is right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", help="HOST:PORT of a running server; default: start one")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the encoder's own work is small; leave the cores to the server
    sentences = load_sentences()
    with nullcontext(args.target) if args.target else running_server() as target:
        started = time.perf_counter()
        embeddings, server = asyncio.run(embed_all(target, sentences))
        seconds = time.perf_counter() - started
    right = report(sentences, embeddings, server, seconds)
    print("all right" if right else "WRONG: see the tables")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
