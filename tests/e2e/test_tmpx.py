"""x."""
import asyncio, grpc, pytest, torch
from running_server import K, Running
from stream_peer import open_stream
from qlinear_service.engine import Engine
X = torch.ones(2, K).half()

@pytest.mark.parametrize("how",["unary","stream"])
@pytest.mark.parametrize("quick",[True,False])
async def test_x(running: Running, monkeypatch, how, quick):
    def run(*a, **k): raise asyncio.CancelledError("foreign")
    monkeypatch.setattr(Engine, "run", run)
    monkeypatch.setattr(Engine, "is_quick", lambda s,b: quick)
    if how == "unary":
        e = await running.refused(running.request("one/up", X), timeout=5)
        print(e.code(), e.details())
    else:
        p = open_stream(running, timeout=5)
        await p.send(1,"one/up",X)
        print(await p.error(1))
    print(running.server.batch_loop)
    monkeypatch.undo()
    await running.lives_on()
