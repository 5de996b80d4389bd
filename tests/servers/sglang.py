"""Stand-in for ``python -m sglang.launch_server --enable-memory-saver``: ``python -m tests.servers.sglang``.

Mirrors sgl-project/sglang v0.5: python/sglang/srt/entrypoints/http_server.py and
managers/scheduler_update_weights_mixin.py. It dies of a release while it works, of releasing what is released, and of
resuming what is not. No tags and an empty list mean all. Without ``--enable-weights-cpu-backup`` weights come back as
garbage, and nothing tells so.
``--fault``: "keeps memory", "frees late" (answers before the memory is free), "refuses TAG", and those of web.py.
"""

from __future__ import annotations

import argparse
import secrets
import threading
import time
from collections.abc import Sequence

from tests.servers.memory import Part
from tests.servers.web import Asked, Fault, Reply, StandIn, arguments, completion, die, faults_of, run, sample
from timeslice.arena import DeviceOutOfMemoryError

TAGS = ("kv_cache", "weights", "cuda_graph")
LATE_S = 0.6


class Sglang(StandIn):
    def __init__(self, options: argparse.Namespace) -> None:
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
        self.routes = {
            ("GET", "/health"): self.health,
            ("GET", "/health_generate"): self.health,
            ("GET", "/get_server_info"): self.info,
            ("GET", "/get_load"): self.load,
            ("POST", "/flush_cache"): self.flush_cache,
            ("POST", "/release_memory_occupation"): self.release,
            ("POST", "/resume_memory_occupation"): self.resume,
            ("POST", "/v1/completions"): self.completions,
            ("POST", "/push"): self.push,  # stands for /update_weights_from_tensor
        }

    def info(self, _: Asked) -> Reply:
        flags = {
            "enable_memory_saver": self.options.enable_memory_saver,
            "enable_weights_cpu_backup": self.options.enable_weights_cpu_backup,
        }
        sizes = {name: round(size / (1 << 30), 2) for name, size in self.sizes.items()}  # in GiB
        told = {"random_seed": self.random_seed, "internal_states": [{"memory_usage": sizes}], "version": "0.5.5"}
        return Reply(200, {**flags, **told})

    def health(self, _: Asked) -> Reply:
        """Both routes generate a token. The scheduler passes over that while it works or a tag is released."""
        return Reply() if self.running or self.offload_tags else self.completions(Asked({}, {"max_tokens": 1}))

    def load(self, _: Asked) -> Reply:
        return Reply(200, [{"dp_rank": 0, "num_reqs": self.running, "num_waiting_reqs": self.waiting}])

    def flush_cache(self, _: Asked) -> Reply:
        if self.offload_tags:
            die("flush of a cache that is released")
        return Reply(400 if self.running or self.waiting else 200, b"Cache flushed.\n")

    def release(self, asked: Asked) -> Reply:
        tags = asked.body.get("tags") or TAGS
        if self.running or self.waiting:
            die("AssertionError: release_memory_occupation should be called only when server is idle.")
        if self.offload_tags & set(tags):
            die("Cannot pause allocation that is not active")
        self.offload_tags |= set(tags)
        if not self.options.enable_memory_saver or self.fault("keeps memory"):
            return Reply(200, None)
        if self.fault("frees late"):
            threading.Timer(LATE_S, self._free, [tags]).start()
        else:
            self._free(tags)
        return Reply(200, None)

    def _free(self, tags: Sequence[str]) -> None:
        for tag in tags:
            part = self.parts[tag]
            keeps = tag == "weights" and self.options.enable_weights_cpu_backup
            (part.offload if keeps else part.discard)()

    def resume(self, asked: Asked) -> Reply:
        for tag in asked.body.get("tags") or TAGS:
            if tag not in self.offload_tags:
                die(f"KeyError: {tag}")
            if self.fault(f"refuses {tag}"):
                return Reply(400, b"not now")
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
    made.add_argument("--random-seed", type=int, help="drawn at each start by default")
    return made


def main() -> None:
    options = parser().parse_args()
    run(Sglang(options), options)


if __name__ == "__main__":
    main()
