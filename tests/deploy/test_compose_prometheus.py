"""Prometheus as the compose file starts it: its flags and configuration, in a process.

The containers themselves need images of a registry; docs/deployment.md says what of them was tried.
"""

from pathlib import Path

import grpc
import pytest
import yaml
from real_prometheus import LAYER, K, Watched, prometheus, served_model, until
from source_tree import ROOT

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

COMPOSE = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
OF_THE_CONTAINER = ("--config.file=", "--storage.tsdb.path=")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_its_flags_and_rules_work_and_it_keeps_the_traces_of_slow_calls(tmp_path: Path) -> None:
    """From a call with a trace context to the trace id behind a bucket of its histogram."""
    command = COMPOSE["services"]["prometheus"]["command"]
    flags = [word for word in command if not word.startswith(OF_THE_CONTAINER)]
    assert len(command) - len(flags) == len(OF_THE_CONTAINER)
    config = "prometheus.compose.yml"
    with (
        served_model("--measure-seconds", "0") as (target, metrics),
        prometheus(tmp_path, metrics, *flags, config=config) as address,
    ):
        watched = Watched(target, metrics, address)
        query = "qlinear_request_seconds_bucket"
        words = {"query": query, "start": "0", "end": "4000000000"}
        assert watched.api("query_exemplars", **words) == []
        x = pb.Tensor(dtype=1, shape=[1, K], data=bytes(K * 2))
        with grpc.insecure_channel(target) as channel:
            pb_grpc.QuantizedLinearStub(channel).MatMul(
                pb.MatMulRequest(layer=LAYER, x=x),
                metadata=(("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01"),),
            )
        (series,) = until("an exemplar", lambda: watched.api("query_exemplars", **words))
        assert series["seriesLabels"]["job"] == "qlinear"
        assert {one["labels"]["trace_id"] for one in series["exemplars"]} == {TRACE}
        groups = watched.api("rules")["groups"]
        assert sum(len(group["rules"]) for group in groups) > 30
