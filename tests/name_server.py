"""A real name server on the loopback address, whose answers a test changes."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from dnslib import QTYPE, RR, A, DNSRecord
from dnslib.server import BaseResolver, DNSHandler, DNSLogger, DNSServer

NAME = "qlinear.models.svc.cluster.local"
LIFE_SECONDS = 1
"""How long an answer may be kept; Kubernetes says 5 to 30."""


class Names(BaseResolver):
    """What the name of a headless Service stands for: the addresses of its ready pods."""

    def __init__(self) -> None:
        self._addresses: tuple[str, ...] = ()
        self.asked: Counter[str] = Counter()
        """How often, by the type of record."""
        self.port = 0

    def show(self, *addresses: str) -> None:
        """Answer with these from now on."""
        self._addresses = addresses

    def resolve(self, request: DNSRecord, handler: DNSHandler) -> DNSRecord:
        """Answer one question; other names do not exist, and there is no IPv6."""
        reply, question = request.reply(), request.q
        self.asked[QTYPE[question.qtype]] += 1
        if str(question.qname).rstrip(".") == NAME and question.qtype == QTYPE.A:
            for address in self._addresses:
                reply.add_answer(RR(question.qname, QTYPE.A, rdata=A(address), ttl=LIFE_SECONDS))
        return reply


@contextmanager
def name_server() -> Iterator[Names]:
    """Answer questions on a free UDP port of 127.0.0.1 until the end of the block."""
    names = Names()
    quiet = DNSLogger(log="-request,-reply,-truncated")
    server = DNSServer(names, address="127.0.0.1", port=0, logger=quiet)
    names.port = server.server.server_address[1]
    server.start_thread()
    try:
        yield names
    finally:
        server.stop()
        server.thread.join()
        server.server.server_close()
