"""Lets the kernels of a device into the slab, and says in the log where that cannot be.

Knows the slab as memory only.
"""

import logging

from qlinear_service.gpu.streams import Device
from qlinear_service.log_values import event
from qlinear_service.slots import Slab

__all__ = ["admitted"]

logger = logging.getLogger(__name__)


def admitted(device: Device, slab: Slab) -> bool:
    """Let kernels of `device` into `slab`, until it dismisses that; return whether they are."""
    nbytes = slab.capacity_bytes
    why_not = device.admit(slab.address, nbytes)
    if why_not:
        event(
            logger,
            logging.WARNING,
            "slab_not_registered",
            bytes=nbytes,
            action="pinned_copies",
            reason=why_not,
        )
        return False
    slab.pin()
    return True
