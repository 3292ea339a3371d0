"""Zero points of GPTQ files: minus one or not, packed along n, and what tools did to zero itself.

v1 stores a zero point minus one, which for 0 has no proper value. GPTQModel subtracts from whole
words, so that a 0 borrows from its neighbour, and adding the same constant to whole words brings
all of them back. AutoGPTQ writes 15 and its reader makes that 16: so do we, and say so.
"""

import logging
from dataclasses import dataclass

import torch

from qlinear_service.checkpoints.checkpoint import Module
from qlinear_service.checkpoints.words import unpack_columns
from qlinear_service.log_values import event

__all__ = ["ZeroPoints"]

logger = logging.getLogger(__name__)

_ONES = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True, slots=True)
class ZeroPoints:
    """How a checkpoint stores its zero points."""

    bits: int
    minus_one: bool
    """True for v1."""
    word_wise: bool
    """True where one was subtracted from whole words."""

    @property
    def middle(self) -> int:
        """The zero point of symmetric codes."""
        return 1 << (self.bits - 1)

    @property
    def labelled(self) -> int:
        """What symmetric files with such a label store."""
        return self.middle - 1 if self.minus_one else self.middle

    @property
    def mislabelled(self) -> int:
        """What they store if the label is wrong."""
        return 2 * self.middle - 1 - self.labelled

    def all_middle(self, stored: torch.Tensor) -> bool:
        """Say whether stored zero points are those of symmetric codes, whatever the label."""
        return bool((stored == self.labelled).all()) or bool((stored == self.mislabelled).all())

    def check_symmetric(self, module: Module) -> None:
        """Check that every zero point of a layer is in the middle, in either of the two ways.

        Raises:
            CheckpointError: one is not.
        """
        spec = module.spec
        stored = unpack_columns(module.tensor("qzeros"), bits=self.bits)[:, : spec.n]
        if bool((stored == self.labelled).all()):
            return
        if bool((stored == self.mislabelled).all()):
            # Published models carry the wrong label. With symmetric codes the content is
            # unambiguous, and believing the label would shift every weight by one scale.
            event(
                logger, logging.WARNING, "zero_points_mislabelled",
                module=spec.module, file=module.tensors["qzeros"].path, stored=self.mislabelled,
                label=spec.source.format, label_means=self.labelled, loaded_as=self.middle,
            )  # fmt: skip
            return
        group, column = (int(i) for i in (stored != self.labelled).nonzero()[0])
        raise module.error(
            "qzeros",
            f"the stored zero point of group {group}, column {column} is "
            f"{int(stored[group, column])}, but the configuration says symmetric, which has "
            f"{self.labelled} everywhere; correct sym in the configuration, or quantize again",
        )

    def decoded(self, module: Module, words: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Return the zero points that lie in `words`, uint8 [groups, end - begin].

        Args:
            module: whose they are, for messages.
            words: int32 [groups, words of features `begin` to `end`].
            begin: first output feature, at the start of a word.
            end: behind the last one.

        Raises:
            CheckpointError: one is beyond what 8 bits hold.
        """
        if self.minus_one and self.word_wise:
            words = ((words.long() + _ONES[self.bits]) & 0xFFFFFFFF).to(torch.int32)
            return unpack_columns(words, bits=self.bits)[:, : end - begin]
        stored = unpack_columns(words, bits=self.bits)[:, : end - begin]
        if not self.minus_one:
            return stored
        most = 2**self.bits - 1
        beyond = (stored == most).nonzero()
        if len(beyond):
            group, column = (int(i) for i in beyond[0])
            if self.bits == 8:
                raise module.error(
                    "qzeros",
                    f"the stored zero point of group {group}, column {column + begin} is {most}, "
                    f"which v1 means as {most + 1}: the tool that wrote it cannot store 0; "
                    "quantize again, in the format gptq_v2",
                )
            event(
                logger, logging.WARNING, "zero_points_beyond_codes",
                module=module.spec.module, file=module.tensors["qzeros"].path, first_group=group,
                first_column=column + begin, stored=most, loaded_as=most + 1,
            )  # fmt: skip
        return stored + 1
