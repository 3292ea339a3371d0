"""Who has had how much: clients take turns in rounds, so that none can push others aside.

In each round a client may use the engine for a quantum of time; whoever has used it up comes after
all who have not, for as long as any of those wait. Nobody saves up: a client that was away begins
in the round of the others. Pure; knows items of no kind.
"""

__all__ = ["MOST_CLIENTS", "QUANTUM_SECONDS", "Share", "Shares"]

MOST_CLIENTS = 256
"""Tracked at a time; all others share one share."""

QUANTUM_SECONDS = 1e-3
"""Of computing, for each client and round: some batches of a GPU, less than one of a large layer
on a CPU. Within a round what is due first goes first, whoever it belongs to."""

MOST_NAME = 128


class Share:
    """What one client, or all that are not tracked, has had."""

    __slots__ = ("_used", "name", "round", "waiting")

    def __init__(self, name: str | None) -> None:
        self.name = name
        """None: of all that are not tracked."""
        self.round = 0
        self.waiting = 0
        """Items that wait."""
        self._used = 0.0

    def charge(self, seconds: float) -> None:
        """Count time of the engine that was given to it."""
        self._used += seconds
        if self._used >= QUANTUM_SECONDS:
            quanta = int(self._used / QUANTUM_SECONDS)
            self._used -= quanta * QUANTUM_SECONDS
            self.round += quanta


class Shares:
    """The shares of all clients that have something waiting, and of some that had."""

    def __init__(self, most: int = MOST_CLIENTS) -> None:
        self._most = most
        self._tracked: dict[str, Share] = {}
        self._idle: dict[str, Share] = {}  # the tracked ones with nothing waiting, oldest first
        self._others = Share(None)
        self._round = 0

    def __len__(self) -> int:
        return len(self._tracked)

    def enter(self, client: str) -> Share:
        """Return the share of a client of which one more item waits."""
        share = self._tracked.get(client) or self._track(client[:MOST_NAME])
        if not share.waiting:
            if share.name is not None:
                self._idle.pop(share.name, None)
            share.round = max(share.round, self._round)
        share.waiting += 1
        return share

    def leave(self, share: Share) -> None:
        """Note that one item less of it waits."""
        share.waiting -= 1
        if not share.waiting and share.name is not None:
            self._idle[share.name] = share

    def serve(self, share: Share) -> None:
        """Note whose turn it is: the round of those who come anew."""
        self._round = max(self._round, share.round)

    def _track(self, name: str) -> Share:
        share = self._tracked.get(name)
        if share is not None:
            return share
        if len(self._tracked) >= self._most:
            if not self._idle:
                return self._others
            forgotten = next(iter(self._idle))
            del self._idle[forgotten], self._tracked[forgotten]
        share = self._tracked[name] = Share(name)
        return share
