"""Stand-in for ``python -m sglang.launch_server --enable-memory-saver``: ``python -m tests.servers.sglang``.

Mirrors sgl-project/sglang from v0.4.7 to v0.5.23 (``--version``): python/sglang/srt/entrypoints/http_server.py,
managers/scheduler.py (process_input_requests, is_fully_idle, flush_cache, get_internal_state), and
managers/scheduler_update_weights_mixin.py, later managers/scheduler_components/weight_updater.py. It dies of a release
while it works, of releasing what is released, of resuming what is not, and of a token computed on memory that is
released. No tags and an empty list mean all; before v0.4.8 tags are passed over. Without
``--enable-weights-cpu-backup`` weights come back as garbage, and nothing tells so.

``/health`` computes a token from v0.4.10 on, unless the server works or SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false
(v0.5.6). With something released, v0.5.0 to v0.5.9 drop that request: 503 when SGLANG_HEALTH_CHECK_TIMEOUT is over.
Before and after them it is computed all the same.
``--fault``: "keeps memory", "frees late" (answers before the memory is free), "refuses TAG", "hangs" (its scheduler
answers nothing any more), "hangs after release", and those of web.py.
"""

from __future__ import annotations

import argparse
import os
import secrets
import threading
import time
from collections.abc import Sequence

from tests.servers.memory import Part
from tests.servers.web import LOST, Asked, Fault, Reply, StandIn, arguments, completion, die, faults_of, run, sample
from timeslice.arena import DeviceOutOfMemoryError

TAGS = ("kv_cache", "weights", "cuda_graph")
LATE_S = 0.6
FLUSHED = b"""Cache flushed.
Please check backend logs for more details. (When there are running or waiting requests, the operation will not be \
performed.)
"""


class Sglang(StandIn):
    def __init__(self, options: argparse.Namespace) -> None:
        self.version = tuple(map(int, options.version.split(".")))
        super().__init__(faults=faults_of(options.fault), token=options.proxy_token)
        self.options = options
        self.weights = Part("weights", options.weights, options.device, options.seed)
        self.parts = {
            "weights": self.weights,
            "kv_cache": Part("kv_cache", options.kv_cache, options.device),
            "cuda_graph": Part("cuda_graph", 4096, options.device),
        }
        self.sizes = {"weight": options.weights, "kvcache": options.kv_cache}
        self.offload_tags: set[str] = set()
        self.random_seed = options.random_seed or secrets.randbelow(1 << 30)
        self.healthy = True
        self.health_timeout_s = float(os.environ.get("SGLANG_HEALTH_CHECK_TIMEOUT", "20"))
        self.routes = {
            ("GET", "/health"): self.health,
            ("GET", "/health_generate"): self.health_generate,
            ("GET", "/ping"): self.ping,
            ("GET", "/get_server_info"): self.info,
            ("POST", "/v1/completions"): self.completions,
            ("POST", "/push"): self.push,  # stands for /update_weights_from_tensor
        }
        for method in ("GET", "POST"):
            self.routes |= {
                (method, "/flush_cache"): self.flush_cache,
                (method, "/release_memory_occupation"): self.release,
                (method, "/resume_memory_occupation"): self.resume,
            }
        if self.version >= (0, 5, 6):
            self.routes["GET", "/server_info"] = self.info
        if self.version < (0, 5, 23):
            self.routes["GET", "/get_load"] = self.load

    def info(self, _: Asked) -> Reply:
        """The scheduler's answer, from what it knows: nothing of it is on the device."""
        if self.fault("hangs"):
            return LOST
        flags = {"enable_memory_saver": self.options.enable_memory_saver}
        if self.version >= (0, 5, 3):
            flags["enable_weights_cpu_backup"] = self.options.enable_weights_cpu_backup
        sizes = {name: round(size / (1 << 30), 2) for name, size in self.sizes.items()}  # in GiB
        told = {
            "random_seed": self.random_seed,
            "internal_states": [{"memory_usage": sizes}],
            "version": self.options.version,
        }
        return Reply(200, {**flags, **told})

    def health(self, asked: Asked) -> Reply:
        generates = os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "true").lower() in {"1", "true", "yes"}
        if self.version < (0, 4, 10) or (self.version >= (0, 5, 6) and not generates):
            return Reply()
        return self.health_generate(asked)

    def health_generate(self, _: Asked) -> Reply:
        """The scheduler passes over it while it works: what it computes then is answer enough."""
        if self.running:
            return Reply()
        if self.offload_tags and (0, 5, 0) <= self.version < (0, 5, 10):
            time.sleep(self.health_timeout_s)
            self.healthy = False
            return Reply(503)
        return self.completions(Asked({}, {"max_tokens": 1}))

    def ping(self, _: Asked) -> Reply:
        """The HTTP server's own word."""
        return Reply(200 if self.healthy or self.version < (0, 5, 23) else 503)

    def load(self, _: Asked) -> Reply:
        return Reply(200, [{"dp_rank": 0, "num_reqs": self.running, "num_waiting_reqs": self.waiting}])

    def flush_cache(self, _: Asked) -> Reply:
        if self.offload_tags:
            die("flush of a cache that is released")
        refused = self.running or self.waiting
        return Reply(400 if refused else 200, FLUSHED)

    def release(self, asked: Asked) -> Reply:
        tags = self._tags(asked)
        if self.running or self.waiting:
            when = "server is idle" if self.version >= (0, 5, 10) else "no ongoing request"
            die(f"AssertionError: release_memory_occupation should be called only when {when}.")
        if self.offload_tags & set(tags):
            die("Cannot pause allocation that is not active")
        self.offload_tags |= set(tags)
        if self.fault("hangs after release"):
            self.faults["hangs"] = -1
        if not self.options.enable_memory_saver or self.fault("keeps memory"):
            return Reply(200, None)
        if self.fault("frees late"):
            threading.Timer(LATE_S, self._free, [tags]).start()
        else:
            self._free(tags)
        return Reply(200, None)

    def _tags(self, asked: Asked) -> Sequence[str]:
        return asked.body.get("tags") or TAGS if self.version >= (0, 4, 8) else TAGS

    def _free(self, tags: Sequence[str]) -> None:
        for tag in tags:
            part = self.parts[tag]
            keeps = tag == "weights" and self.options.enable_weights_cpu_backup
            (part.offload if keeps else part.discard)()

    def resume(self, asked: Asked) -> Reply:
        for tag in self._tags(asked):
            if tag not in self.offload_tags:
                die(f"KeyError: {tag}")
            if self.fault(f"refuses {tag}"):
                return Reply(400, {"error": {"message": "not now"}})
            try:
                if not self.parts[tag].on_device:
                    self.parts[tag].back()
            except DeviceOutOfMemoryError as error:
                raise Fault(f"CUDA out of memory: {error}") from error
            self.offload_tags.remove(tag)
        with self.changed:
            self.changed.notify_all()
        return Reply(200, None)

    def push(self, asked: Asked) -> Reply:
        self.weights.push(int(asked.body["seed"]))
        return Reply(200, {"success": True})

    def completions(self, asked: Asked) -> Reply:
        prompt, count = str(asked.body.get("prompt", "")), int(asked.body.get("max_tokens", 16))
        with self.changed:
            self.running += 1
        try:
            for part in self.parts.values():
                part.touch()
            time.sleep(count * self.options.token_s)
            return completion(sample(self.weights.digest(), prompt, count))
        except RuntimeError as error:
            die(str(error))
            raise
        finally:
            with self.changed:
                self.running -= 1


def parser() -> argparse.ArgumentParser:
    made = arguments("sglang")
    made.add_argument("--enable-memory-saver", action="store_true")
    made.add_argument("--enable-weights-cpu-backup", action="store_true")
    made.add_argument("--version", default="0.5.10")
    made.add_argument("--random-seed", type=int, help="drawn at each start by default")
    return made


def main() -> None:
    options = parser().parse_args()
    run(Sglang(options), options)


if __name__ == "__main__":
    main()
