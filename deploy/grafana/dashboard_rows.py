"""What the dashboard shows, row by row: titles, one line on how to read each panel, queries.

Records of deploy/prometheus/rules where there are any. Knows nothing of layout or of JSON.
"""

from dashboard_panels import Panel, Query, bars, buckets, cells, lines, value
from grafana_foundation_sdk.models.dashboard import FieldColorModeId

ON = 'instance=~"$instance"'
OF = f'{ON}, shape=~"$shape"'
RATE = "[$__rate_interval]"
LAUNCH = "{{shape}} m {{m}}"
GREEN_TO_RED = FieldColorModeId.CONTINUOUS_GR_YL_RD
RED_TO_GREEN = FieldColorModeId.CONTINUOUS_RD_YL_GR


def quantile(q: float, metric: str, by: str = "", only: str = ON) -> str:
    """Return the query of a quantile of a histogram, over all servers chosen."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{{{only}}}{RATE})))"


def mean(metric: str, by: str = "", only: str = ON) -> str:
    """Return the query of a histogram's mean; no value where nothing was observed."""
    group = f"sum by ({by})" if by else "sum"
    above = f"{group} (rate({metric}_sum{{{only}}}{RATE}))"
    return f"{above} / ({group} (rate({metric}_count{{{only}}}{RATE})) > 0)"


def rate(metric: str, by: str, more: str = "") -> str:
    """Return the query of a counter's rate."""
    return f"sum by ({by}) (rate({metric}{{{ON}{more}}}{RATE}))"


def health() -> list[Panel]:
    """Is it up, and are its promises kept."""
    burn = ((0.0, "green"), (1.0, "orange"), (14.4, "red"))
    return [
        value("Ready", "Answers calls.", Query(f"qlinear_ready{{{ON}}}"),
              colours=((0.0, "red"), (1.0, "green")), words={"0": "no", "1": "yes"}),
        value("Alerts", "Firing now; docs/operations.md says what each one means.",
              Query('count(ALERTS{alertname=~"Qlinear.*", alertstate="firing"}) or vector(0)', ""),
              colours=((0.0, "green"), (1.0, "red"))),
        value("Failures, burn rate", "1: the error budget lasts just its 30 days. Last hour.",
              Query("job:qlinear_failed_burn:ratio_rate1h", "{{job}}"), colours=burn),
        value("Slow answers, burn rate", "1: as many slow answers as the objective allows.",
              Query("job:qlinear_slow_burn:ratio_rate1h", "{{job}}"), colours=burn),
        value("p99", "One answer in a hundred takes longer. Last five minutes.",
              Query(f"instance:qlinear_request_seconds:p99_5m{{{ON}}}"), unit="s"),
        value("Device busy", "Share of the time in which it computes.",
              Query(f"instance:qlinear_device_busy:ratio_rate5m{{{ON}}}"), unit="percentunit"),
        value("Runs", "Version, device and kernels.",
              Query(f"qlinear_build_info{{{ON}}}", "{{version}} {{device}} {{kernels}}"),
              names_only=True, width=8),
        value("Layers", "That are served.", Query(f"qlinear_layers_loaded{{{ON}}}")),
        value("Weights", "Memory of all layers as packed.",
              Query(f"qlinear_weight_bytes{{{ON}}}"), unit="bytes"),
        value("Last start", "From loading to ready.",
              Query(f"qlinear_load_seconds{{{ON}}}"), unit="s"),
        value("Measured peak", "Largest read rate that the server measured at its start.",
              Query(f"qlinear_hbm_peak_bytes_per_second{{{ON}}}"), unit="Bps"),
    ]  # fmt: skip


def traffic() -> list[Panel]:
    """What is asked for."""
    return [
        lines("Calls", "Finished calls a second, by method.",
              Query(rate("qlinear_requests_total", "method"), "{{method}}"), unit="reqps"),
        lines("Calls that did not end well", "By status; refusals for load are under Overload.",
              Query(rate("qlinear_requests_total", "code", ', code!="OK"'), "{{code}}"),
              unit="reqps"),
        lines("Rows", "Rows computed a second, by shape.",
              Query(rate("qlinear_batch_rows_sum", "shape"), "{{shape}}"), stacked=True),
        lines("Busiest layers", "Calls a second of the five that are asked for most.",
              Query(f"topk(5, {rate('qlinear_requests_total', 'layer')})", "{{layer}}"),
              unit="reqps", width=12),
        lines("Budgets", "How fast error budgets are spent: 1 is the rate that lasts 30 days.",
              Query("job:qlinear_failed_burn:ratio_rate5m", "failed, 5 m"),
              Query("job:qlinear_failed_burn:ratio_rate6h", "failed, 6 h"),
              Query("job:qlinear_slow_burn:ratio_rate5m", "slow, 5 m"),
              Query("job:qlinear_slow_burn:ratio_rate6h", "slow, 6 h"), width=12),
    ]  # fmt: skip


def latency() -> list[Panel]:
    """Where the time goes."""
    request, kernel = "qlinear_request_seconds", "qlinear_kernel_seconds"
    queue, transfer, reply = (f"qlinear_{x}_seconds" for x in ("queue", "transfer", "reply"))
    return [
        lines("Arrival to reply", "Of answered calls.",
              *(Query(quantile(q, request), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)),
              unit="s"),
        lines("Mean of each step", "Stacked: the wait in the queue, each copy, one computation, "
              "the reply. What is missing to the mean of a call is spent in front of the queue.",
              Query(mean(queue), "queue"), Query(mean(transfer, "direction"), "{{direction}}"),
              Query(mean(kernel), "kernel"), Query(mean(reply), "reply"), unit="s", stacked=True),
        lines("p99 of each step", "Each by itself; they do not add up.",
              Query(quantile(0.99, queue), "queue"),
              Query(quantile(0.99, transfer, "direction"), "{{direction}}"),
              Query(quantile(0.99, kernel), "kernel"), Query(quantile(0.99, reply), "reply"),
              unit="s"),
    ]  # fmt: skip


def batching() -> list[Panel]:
    """What batching makes of the traffic."""
    return [
        lines("Rows per batch over the sweet spot", "1: batches are as large as they get at the "
              "price of one row. Far below: room for load. Above: rows cost time.",
              Query(f"qlinear:batch_rows_of_sweet_spot:ratio_mean5m{{{OF}}}", "{{shape}}"), top=1),
        lines("Rows per batch", "Mean, by shape.",
              Query(mean("qlinear_batch_rows", "shape", OF), "{{shape}}")),
        lines("Calls per batch", "Mean, by shape. 1: nobody else asks for that layer meanwhile.",
              Query(mean("qlinear_batch_requests", "shape", OF), "{{shape}}")),
    ]  # fmt: skip


def shapes() -> list[Panel]:
    """Latency and bandwidth of each shape, as heat."""
    return [
        cells("p99 by shape", "Arrival to reply.",
              Query(quantile(0.99, "qlinear_request_seconds", "shape", OF), "{{shape}}"),
              unit="s", scheme=GREEN_TO_RED),
        cells("Bandwidth over the measured peak", "Effective bandwidth of each shape and batch "
              "size, green where it nears the peak.",
              Query(f"qlinear:kernel_bandwidth_of_peak:ratio_rate1m{{{OF}}}", LAUNCH),
              unit="percentunit", scheme=RED_TO_GREEN, most=1),
        lines("Effective bandwidth", "Packed bytes over the time of computing, and the peak.",
              Query(f"qlinear:kernel_bandwidth_bytes_per_second:rate1m{{{OF}}}", LAUNCH),
              Query(f"qlinear_hbm_peak_bytes_per_second{{{ON}}}", "peak {{instance}}"),
              unit="Bps", width=12),
        lines("p99 of one computation", "By shape and batch size.",
              Query(quantile(0.99, "qlinear_kernel_seconds", "shape, m", OF), LAUNCH),
              unit="s", width=12),
        buckets("Latency of $shape", "How many calls took how long.",
                Query("sum by (le) (increase(qlinear_request_seconds_bucket"
                      f"{{{OF}}}{RATE}))", "{{le}}"), repeat="shape"),
    ]  # fmt: skip


def roofline() -> list[Panel]:
    """How near to what the machine can do."""
    return [
        bars("Roofline ratio", "Shortest possible time over measured time, last five minutes. "
             "Near 1 only other hardware is faster.",
             Query(f"qlinear:roofline_ratio:avg5m{{{OF}}}", LAUNCH), unit="percentunit", top=1),
        lines("Roofline ratio over time", "Last minute.",
              Query(f"qlinear:roofline_ratio:avg1m{{{OF}}}", LAUNCH),
              unit="percentunit", top=1, width=12),
        bars("Bandwidth over the measured peak", "Last five minutes.",
             Query(f"qlinear:kernel_bandwidth_of_peak:ratio_rate5m{{{OF}}}", LAUNCH),
             unit="percentunit", top=1),
        lines("Bandwidth over the tuned one", "What serving reaches of what the plan reached when "
              "it was tuned. Under 60 % with batches near the sweet spot is an alert.",
              Query(f"qlinear:kernel_bandwidth_bytes_per_second:rate5m{{{OF}}}"
                    f" / qlinear_tuned_bandwidth_bytes_per_second{{{OF}}}", LAUNCH),
              unit="percentunit", top=1, width=12),
    ]  # fmt: skip


def overload() -> list[Panel]:
    """Is it too much."""
    return [
        lines("Refused", "Calls a second, by reason.",
              Query(rate("qlinear_rejected_total", "reason"), "{{reason}}"), unit="reqps"),
        lines("Expired and cancelled", "Deadline passed unanswered; taken back by the caller.",
              Query(rate("qlinear_expired_total", "instance"), "expired {{instance}}"),
              Query(rate("qlinear_cancelled_total", "instance"), "cancelled {{instance}}"),
              unit="reqps"),
        lines("Memory of calls over its limit", "Waiting and running; at 1 calls are refused.",
              Query(f"instance:qlinear_inflight_of_limit:ratio{{{ON}}}"),
              unit="percentunit", top=1),
        lines("Rows that wait", "The five longest queues.",
              Query(f"topk(5, sum by (layer) (qlinear_queue_rows{{{ON}}}))", "{{layer}}"),
              width=12),
        lines("Wait for a batch", "One call in twenty waits longer.",
              Query(f"instance:qlinear_queue_seconds:p95_5m{{{ON}}}"), unit="s", width=12),
    ]  # fmt: skip


def gpu() -> list[Panel]:
    """What explains a slow day; empty on a CPU."""
    name = "{{instance}} {{device}}"
    return [
        lines("Clock", "Of the multiprocessors, and of the memory.",
              Query(f"qlinear_gpu_clock_hertz{{{ON}}}", name),
              Query(f"qlinear_gpu_memory_clock_hertz{{{ON}}}", f"{name} memory"),
              unit="hertz", width=6),
        lines("Throttled", "1 while power, heat or hardware keep the clock down.",
              Query(f"qlinear_gpu_throttled{{{ON}}}", name), top=1, width=6),
        lines("Power", "Drawn now.",
              Query(f"qlinear_gpu_power_watts{{{ON}}}", name), unit="watt", width=6),
        lines("Temperature", "Of the GPU.",
              Query(f"qlinear_gpu_temperature_celsius{{{ON}}}", name), unit="celsius", width=6),
        lines("Why it is throttled", "Share of the last five minutes, by reason.",
              Query(f"avg_over_time(qlinear_gpu_throttle_reason{{{ON}}}[5m])",
                    f"{name} {{{{reason}}}}"), unit="percentunit", top=1, width=12),
        lines("Memory errors", "ECC, since the driver was loaded. Uncorrected ones end what ran.",
              Query(f"qlinear_gpu_memory_errors{{{ON}}}", f"{name} {{{{kind}}}}"), width=12),
    ]  # fmt: skip


ROWS = {
    "Health": health,
    "Traffic": traffic,
    "Where the time goes": latency,
    "Batching": batching,
    "Shapes": shapes,
    "Roofline": roofline,
    "Overload": overload,
    "GPU": gpu,
}
"""From the top of the dashboard to its end."""
