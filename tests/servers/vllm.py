"""Stand-in for ``vllm serve MODEL --enable-sleep-mode`` with VLLM_SERVER_DEV_MODE=1: ``python -m tests.servers.vllm``.

Mirrors vllm-project/vllm: vllm/entrypoints/serve/sleep/api_router.py and rpc/api_router.py (v0.16), Executor.sleep and
wake_up of vllm/v1/executor/abstract.py, EngineCore.sleep and wake_up of vllm/v1/engine/core.py. A sleeping server parks
requests without an answer. Waking a tag that is awake passes over the whole call. Level 2 drops the weights.
It says that it sleeps while its scheduler pauses, too (``/pause`` of vllm/entrypoints/serve/dev/rlhf/api_router.py).
``--fault``: "dies on sleep", "keeps memory", "early forward", "odd metrics", and those of web.py.
"""

from __future__ import annotations

import argparse
import os
import time

from tests.servers.memory import Part
from tests.servers.web import Asked, Fault, Reply, StandIn, arguments, completion, faults_of, run, sample
from timeslice.arena import DeviceOutOfMemoryError


class Vllm(StandIn):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(faults=faults_of(options.fault), token=options.proxy_token)
        self.options = options
        self.weights = Part("weights", options.weights, options.device, options.seed)
        self.kv_cache = Part("kv_cache", options.kv_cache_memory_bytes or options.kv_cache, options.device)
        self.sleeping_tags: set[str] = set()
        self.level = 0  # as its metrics tell
        self.paused = self.aborting = self.dead = False
        self.routes = {
            ("GET", "/health"): lambda _: Reply(503 if self.dead else 200),
            ("GET", "/version"): lambda _: Reply(200, {"version": "0.16.0"}),
            ("GET", "/metrics"): self.metrics,
            ("POST", "/v1/completions"): self.completions,
        }
        if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
            self.routes |= {
                ("POST", "/sleep"): self.sleep,
                ("POST", "/wake_up"): self.wake_up,
                ("GET", "/is_sleeping"): self.is_sleeping,
                ("POST", "/pause"): self.pause,
                ("POST", "/resume"): self.resume,
                ("POST", "/collective_rpc"): self.collective_rpc,
            }

    def metrics(self, _: Asked) -> Reply:
        lines = [f'vllm:num_requests_{kind}{{engine="0",model_name="m"}} {number:.1f}'
                 for kind, number in (("running", self.running), ("waiting", self.waiting))]  # fmt: skip
        for level, state in enumerate(("awake", "weights_offloaded", "discard_all")):
            lines.append(f'vllm:engine_sleep_state{{engine="0",sleep_state="{state}"}} {level == self.level:.1f}')
        lines.append(
            f'vllm:cache_config_info{{engine="0",kv_cache_memory_bytes="{self.options.kv_cache_memory_bytes}"}} 1'
        )
        if self.fault("odd metrics"):
            lines = [line.rpartition(" ")[0] + " 1.2.3" for line in lines]
        return Reply(200, "\n".join(["# TYPE vllm:num_requests_running gauge", *lines, ""]).encode())

    def pause(self, _: Asked) -> Reply:
        """Only its scheduler stops; nothing leaves the device."""
        self.paused = True
        return Reply(200, {"status": "paused"})

    def resume(self, _: Asked) -> Reply:
        with self.changed:
            self.paused = False
            self.changed.notify_all()
        return Reply(200, {"status": "resumed"})

    def is_sleeping(self, _: Asked) -> Reply:
        self._living()
        return Reply(200, {"is_sleeping": self.paused or bool(self.sleeping_tags)})

    def sleep(self, asked: Asked) -> Reply:
        self._living()
        level = int(asked.query.get("level", ["1"])[0])
        mode = asked.query.get("mode", ["abort"])[0]
        if self.fault("dies on sleep"):
            self.dead = True
            return Reply()
        with self.changed:
            self.paused, self.aborting = True, mode == "abort"
            self.changed.notify_all()
            while self.running:
                self.changed.wait()
        if not self.sleeping_tags:  # one that sleeps already passes over it
            if not self.fault("keeps memory") and self.options.enable_sleep_mode:
                (self.weights.offload if level == 1 else self.weights.discard)()
                self.kv_cache.discard()
            self.sleeping_tags = {"weights", "kv_cache"}
        self.level = level
        return Reply()

    def wake_up(self, asked: Asked) -> Reply:
        self._living()
        tags = asked.query.get("tags", [])
        self.level = 0
        with self.changed:
            if self.sleeping_tags and set(tags) <= self.sleeping_tags:
                for part in (self.weights, self.kv_cache):
                    if part.name in (tags or self.sleeping_tags):
                        self._back(part)
                        self.sleeping_tags.discard(part.name)
            if not self.sleeping_tags or self.fault("early forward"):
                self.paused = self.aborting = False
                self.changed.notify_all()
        return Reply()

    def _back(self, part: Part) -> None:
        if part.on_device:
            return
        try:
            part.back()
        except DeviceOutOfMemoryError as error:
            raise Fault(f"CUDA Error: out of memory: {error}") from error

    def collective_rpc(self, asked: Asked) -> Reply:
        """``reload_weights`` is the real one; ``push`` stands for a trainer's own method that brings new weights."""
        self._living()
        method, given = asked.body.get("method"), asked.body.get("args", [])
        if method == "reload_weights":
            self.weights.push(self.options.seed)
        elif method == "push":
            self.weights.push(int(given[0]))
        else:
            return Reply(500, {"error": f"no method {method}"})
        return Reply(200, {"results": [None]})

    def completions(self, asked: Asked) -> Reply:
        prompt, count = str(asked.body.get("prompt", "")), int(asked.body.get("max_tokens", 16))
        with self.changed:
            self.waiting += 1
            while self.paused:  # parked, without an answer
                self.changed.wait()
            self.waiting -= 1
            self.running += 1
        try:
            return self._generate(prompt, count)
        except RuntimeError as error:
            self.dead = True
            raise Fault(f"EngineDeadError: {error}") from error
        finally:
            with self.changed:
                self.running -= 1
                self.changed.notify_all()

    def _generate(self, prompt: str, count: int) -> Reply:
        self._living()
        for part in (self.weights, self.kv_cache):
            part.touch()
        text = sample(self.weights.digest(), prompt, count)
        for done in range(count):
            if self.aborting:
                return completion(" ".join(text.split()[:done]), "abort")
            time.sleep(self.options.token_s)
        return completion(text)

    def _living(self) -> None:
        if self.dead:
            raise Fault("EngineDeadError: EngineCore encountered an issue")


def parser() -> argparse.ArgumentParser:
    made = arguments("vllm")
    made.add_argument("--enable-sleep-mode", action="store_true")
    made.add_argument("--kv-cache-memory-bytes", type=int, help="as --kv-cache, and told in the metrics")
    return made


def main() -> None:
    options = parser().parse_args()
    run(Vllm(options), options)


if __name__ == "__main__":
    main()
