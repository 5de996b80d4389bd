"""One job: it samples from a vLLM server of its own, which sleeps while other jobs have the device.

Started by run.py. What a job with a real server does is the same; see docs/recipes.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

import httpx

import timeslice

GROUP = "samplers"
ROOT = Path(__file__).parent.parent.parent
WAIT_S = 60.0
END_S = 5.0


class AsleepError(Exception):
    """The server sleeps: it would keep a request until it wakes, and say nothing until then."""


class Sampler:
    """A server and its client. A real one is started by ``vllm serve MODEL --enable-sleep-mode``."""

    def __init__(self, device: str, seed: int) -> None:
        sizes = ["--device", device, "--weights", str(4 << 20), "--kv-cache", str(2 << 20), "--seed", str(seed)]
        command = [sys.executable, "-m", "tests.servers.vllm", "--enable-sleep-mode", "--token-s", "0.005", *sizes]
        # The server's process shows with these that it is the job's, so that the agent believes the registration.
        environment = {**os.environ, "TIMESLICE_GROUPS": GROUP, "VLLM_SERVER_DEV_MODE": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdin=pipe, stdout=pipe)
        assert self._process.stdout is not None
        url = self._process.stdout.readline().strip()
        self._client = httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False)
        self._registered = timeslice.register_server(GROUP, url, dialect="vllm", pid=self._process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def generate(self, prompt: str) -> str:
        """An automatic hold: it waits for its turn, and the server is awake in it."""
        with timeslice.hold(GROUP, phase="generate", timeout=WAIT_S):
            return self._complete(prompt)

    def generate_now(self, prompt: str) -> str:
        """For callers that would rather not wait: AsleepError at once, instead of a request that is never answered."""
        if not self.ready():
            raise AsleepError("the server sleeps; ask again later, or hold the group")
        return self._complete(prompt)

    def alive(self) -> bool:
        """For a liveness probe. vLLM's /health asks nothing of the device, so a sleeper passes it. A probe that
        generates would hang on a sleeper, and the platform would end it."""
        return self._client.get("/health", timeout=END_S).status_code == 200

    def ready(self) -> bool:
        """For a readiness probe: a sleeper gets no requests, and is not ended for it."""
        return not self._client.get("/is_sleeping", timeout=END_S).json()["is_sleeping"]

    def stop(self, *, sleep_first: bool = True) -> None:
        """The stop hook. On some drivers the end of a process that was restored brought the whole machine down, and
        that of one without device memory did not: so it goes to sleep for good before it ends."""
        if sleep_first and self.ready():
            with timeslice.hold(GROUP, timeout=WAIT_S):
                self._client.post("/sleep", params={"level": "2"})
        self._client.close()
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(END_S)
        self._registered.close()

    def _complete(self, prompt: str) -> str:
        answer = self._client.post("/v1/completions", json={"model": "m", "prompt": prompt, "max_tokens": 12})
        return str(answer.raise_for_status().json()["choices"][0]["text"])


def work(sampler: Sampler, job: str, steps: int, verifier_s: float) -> dict[str, Any]:
    """Sample a step at a time; between two steps the texts are judged, off the device."""
    spans, texts = [], []
    for step in range(steps):
        with timeslice.hold(GROUP, phase="generate", timeout=WAIT_S) as lease:
            began = time.monotonic()
            texts += [sampler.generate(f"{job}, step {step}, prompt {number}") for number in range(4)]
            spans.append(
                {"token": lease.grant.token, "how": lease.grant.how, "began": began, "ended": time.monotonic()}
            )
        time.sleep(verifier_s)
    return {"texts": texts, "spans": spans}


class Monitor:
    """A platform's probes, several times a second."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler, self._over = sampler, threading.Event()
        self.asleep = self.dead = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self.dead += not self._sampler.alive()
            self.asleep += not self._sampler.ready()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def refused(sampler: Sampler) -> dict[str, Any]:
    """What becomes of a request while the server sleeps."""
    began = time.monotonic()
    try:
        sampler.generate_now("are you there")
    except AsleepError:
        return {"refused": True, "refused_s": time.monotonic() - began}
    return {"refused": False, "refused_s": time.monotonic() - began}


def main() -> None:
    """Do what is asked line by line, and say ``done`` each time. The results are written at the end."""
    spec = json.loads(sys.argv[1])
    with timeslice.hold(GROUP, timeout=WAIT_S):  # a server takes its memory as it starts
        sampler = Sampler(spec["device"], spec["seed"])
    result: dict[str, Any] = {"dead": 0, "asleep": 0}
    with sampler:
        print("done", flush=True)
        for line in sys.stdin:
            if line == "sample\n":
                monitor = Monitor(sampler)
                result |= work(sampler, os.environ["TIMESLICE_JOB"], spec["steps"], spec["verifier_s"])
                monitor.stop()
                result |= {"dead": monitor.dead, "asleep": monitor.asleep}
            elif line == "take a turn\n":
                sampler.generate("one more")
            elif line == "ask a sleeper\n":
                result |= refused(sampler)
            print("done", flush=True)
    Path(spec["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
