"""Figures of a running server, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import Scope

from myna.serve.engine_client import EngineClient
from myna.serve.messages import AudioPiece, RequestEnd, StepReport

LATENCY_BUCKETS = (0.02, 0.03, 0.045, 0.06, 0.08, 0.12, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STEP_BUCKETS = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.04, 0.1, 0.5)


class ServerMetrics:
    """Counters, gauges and histograms under `myna_`."""

    def __init__(self, client: EngineClient) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("myna_http_requests", "Requests.", ["path", "status"], registry=registry)
        self._first_audio = Histogram(
            "myna_first_audio_seconds", "To the first byte of audio.", buckets=LATENCY_BUCKETS, registry=registry
        )
        self._seconds = Histogram(
            "myna_speech_request_seconds", "To the last byte of audio.", buckets=LATENCY_BUCKETS, registry=registry
        )
        self._audio = Counter("myna_audio_seconds", "Seconds of speech made.", registry=registry)
        self._ends = Counter("myna_requests_finished", "Ends of requests.", ["finish_reason"], registry=registry)
        self._steps = Histogram("myna_step_seconds", "Of an engine's step.", buckets=STEP_BUCKETS, registry=registry)
        gauges = {
            "myna_streams_speaking": ("Streams that have a row.", lambda: client.speaking),
            "myna_requests_waiting": ("Requests that wait for a row.", lambda: client.waiting),
            "myna_requests_in_flight": ("Requests that were taken and have not ended.", lambda: client.in_flight),
            "myna_rows": ("Streams that are spoken at a time.", lambda: client.settings.rows),
            "myna_engine_restarts": ("Times that the engine process was started again.", lambda: client.restarts),
            "myna_engine_ready": ("Whether the model is loaded and warm.", lambda: client.ready),
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, registry=registry).set_function(value)
        self._client = client
        client.on_report = self._on_report

    def observe_request(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a request. Paths are those of routes: what a client makes up is one path."""
        route = scope.get("route")
        self._requests.labels(getattr(route, "path", "other"), str(status)).inc()
        if getattr(route, "path", "") == "/v1/audio/speech" and status == 200:
            self._seconds.observe(seconds)

    def observe_first_audio(self, seconds: float) -> None:
        self._first_audio.observe(seconds)

    def render(self) -> bytes:
        """All figures in the text format."""
        return generate_latest(self._registry)

    def _on_report(self, report: StepReport) -> None:
        self._steps.observe(report.seconds)
        for event in report.events:
            match event:
                case AudioPiece():
                    assert self._client.known is not None
                    self._audio.inc(len(event.pcm) / 2 / self._client.known.sample_rate)
                case RequestEnd():
                    self._ends.labels("error" if event.failure is not None else event.finish_reason or "done").inc()
