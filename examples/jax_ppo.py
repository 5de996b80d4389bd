"""PPO jobs in plain JAX share one device by turns: each runs alone first, then all together.

Every job is a process that learns to write the sum of two numbers, one digit a step: a policy, a value head, a frozen
reference policy for the KL penalty, Adam, generalised advantages, and the clipped objective over several epochs. Its
rewards come from a verifier that takes as long as the device work of a step: it stands for a sandbox or a judge on
other machines. While one job waits for its rewards, another one has the device. Evaluations and checkpoints are held
too. The comparison is to the bit: rewards of each step, and the parameters at the end.

There is no accelerator. "The device" is the memory of JAX's arrays on the CPU, with one thread a job: when a job has to
leave, its arrays are copied out and deleted, and made again when it returns; the reference policy is copied only once.

    python examples/jax_ppo.py --jobs 2 --json jax.json
    python examples/jax_ppo.py --steps 20 --verifier 0.5      # slow rewards
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import turns

GROUP = "trainers"
WAIT_S = 60.0
DIGITS, PROMPTS, EPOCHS, WIDTH = 3, 1024, 8, 512
CLIP, KL, DISCOUNT, TRACE, RATE = 0.2, 0.02, 1.0, 0.95, 3e-4


# A job: what a researcher has. `Pytrees`, `register_pytree` and the holds are all that is added.


class Learner:
    """PPO in pure functions of JAX. An episode is an answer: DIGITS digits, the last one first."""

    def __init__(self) -> None:
        import jax
        import jax.numpy as jnp

        self.jax, self.jnp = jax, jnp
        self.generate = jax.jit(self._generate)
        self.update = jax.jit(self._update, donate_argnums=(0, 1))

    def fresh(self, seed: int) -> tuple[Any, Any]:
        """Parameters and the state of the optimizer."""
        jax, jnp = self.jax, self.jnp
        sizes = [10 * 4 + DIGITS + 1, WIDTH, WIDTH]
        keys = jax.random.split(jax.random.key(seed), len(sizes))
        layers = [
            {"w": jax.random.normal(key, (fan, out)) * fan**-0.5, "b": jnp.zeros(out)}
            for key, fan, out in zip(keys, sizes, [*sizes[1:], 11], strict=True)
        ]
        zeros = jax.tree.map(jnp.zeros_like, layers)
        return layers, {"count": jnp.zeros((), jnp.int32), "m": zeros, "v": jax.tree.map(jnp.zeros_like, layers)}

    def forward(self, params: Any, seen: Any) -> tuple[Any, Any]:
        """Log-probabilities of the ten digits, and the value."""
        for layer in params[:-1]:
            seen = self.jax.nn.gelu(seen @ layer["w"] + layer["b"])
        out = seen @ params[-1]["w"] + params[-1]["b"]
        return self.jax.nn.log_softmax(out[..., :10]), out[..., 10]

    def _see(self, prompts: Any, place: Any, carry: Any) -> Any:
        one_hot = self.jax.nn.one_hot
        digits = one_hot(prompts, 10).reshape(len(prompts), -1)
        places = one_hot(self.jnp.full(len(prompts), place), DIGITS)
        return self.jnp.concatenate([digits, places, carry[:, None]], -1)

    def _generate(self, params: Any, prompts: Any, key: Any, heat: Any) -> dict[str, Any]:
        """Sampled answers; with no heat the likeliest ones."""
        jax, jnp = self.jax, self.jnp

        def write(last: Any, at: Any) -> tuple[Any, Any]:
            place, key = at
            seen = self._see(prompts, place, last)
            logs, value = self.forward(params, seen)
            token = jnp.argmax(logs + heat * jax.random.gumbel(key, logs.shape), -1)
            log = jnp.take_along_axis(logs, token[:, None], -1)[:, 0]
            return token / 10, {"seen": seen, "token": token, "log": log, "value": value}

        places = jnp.arange(DIGITS), jax.random.split(key, DIGITS)
        return dict(jax.lax.scan(write, jnp.zeros(len(prompts)), places)[1])

    def _update(self, params: Any, adam: Any, reference: Any, found: Any, rewards: Any) -> tuple[Any, Any]:
        """Some epochs of the clipped objective on one batch. ``rewards`` by place and prompt."""
        jax, jnp = self.jax, self.jnp
        kept, _ = self.forward(reference, found["seen"])
        kl = found["log"] - jnp.take_along_axis(kept, found["token"][..., None], -1)[..., 0]
        rewards = rewards - KL * kl

        def back(after: Any, step: Any) -> tuple[Any, Any]:
            reward, value = step
            ahead, next_value = after
            ahead = reward + DISCOUNT * next_value - value + DISCOUNT * TRACE * ahead
            return (ahead, value), ahead

        ends = jnp.zeros_like(rewards[0]), jnp.zeros_like(rewards[0])
        _, advantages = jax.lax.scan(back, ends, (rewards, found["value"]), reverse=True)
        returns = advantages + found["value"]
        scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-6)

        def loss(params: Any) -> Any:
            logs, values = self.forward(params, found["seen"])
            log = jnp.take_along_axis(logs, found["token"][..., None], -1)[..., 0]
            ratio = jnp.exp(log - found["log"])
            gain = jnp.minimum(ratio * scaled, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * scaled)
            entropy = -(jnp.exp(logs) * logs).sum(-1)
            return -gain.mean() + 0.5 * ((values - returns) ** 2).mean() - 0.01 * entropy.mean()

        def epoch(state: Any, _: Any) -> tuple[Any, None]:
            params, adam = state
            slope = jax.grad(loss)(params)
            count = adam["count"] + 1
            m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, adam["m"], slope)
            v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, adam["v"], slope)
            rate = RATE * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
            params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, m, v)
            return (params, {"count": count, "m": m, "v": v}), None

        return jax.lax.scan(epoch, (params, adam), None, length=EPOCHS)[0]  # type: ignore[no-any-return]  # untyped


def prompts_of(seed: int, step: int) -> Any:
    """Two numbers of two digits each."""
    import numpy as np

    return np.random.default_rng([seed, step]).integers(0, 10, (PROMPTS, 4))


def verify(prompts: Any, tokens: Any, latency_s: float) -> Any:
    """A reward for each right digit, by place and prompt. Needs no device."""
    import numpy as np

    time.sleep(latency_s)
    sums = prompts @ [10, 1, 10, 1]
    return np.stack([(tokens[place] == sums // 10**place % 10) for place in range(DIGITS)]).astype(np.float32)


def learn(folder: Path, steps: int, seed: int, latency_s: float) -> dict[str, Any]:
    """The loop: a turn goes from the rewards of one batch to the rewards of the next, so state moves once a step."""
    import jax
    import numpy as np

    import timeslice
    from timeslice.integrations.jax import Pytrees, register_pytree

    learner = Learner()
    rewards: list[float] = []
    evals: list[float] = []
    bodies: list[dict[str, float]] = []

    @contextmanager
    def held(phase: str) -> Iterator[None]:
        with timeslice.hold(GROUP, phase=phase, timeout=WAIT_S):
            entered = time.monotonic()
            yield
            bodies.append({"entered": entered, "left": time.monotonic()})

    def answers(prompts: Any, number: int, heat: float) -> Any:
        return jax.device_get(learner.generate(state.policy, prompts, jax.random.key(number), heat))

    began = time.monotonic()
    with held("init"):
        policy, adam = learner.fresh(seed)
        state = Pytrees(GROUP, policy=policy, optimizer=adam, reference=learner.fresh(seed)[0])
        register_pytree(GROUP, state)
        found = answers(prompts_of(seed, 0), 0, 1.0)
    del policy, adam  # other references would find deleted arrays
    for step in range(steps):
        right = verify(prompts_of(seed, step), found["token"], latency_s)  # others have the device meanwhile
        rewards.append(float(right.mean()))
        with held("train"):
            state.policy, state.optimizer = learner.update(state.policy, state.optimizer, state.reference, found, right)
            if step % 4 == 3:
                asked = prompts_of(seed, 1000 + step)
                with timeslice.hold(GROUP, phase="eval"):
                    evals.append(float(verify(asked, answers(asked, 0, 0.0)["token"], 0.0).mean()))
            if step + 1 < steps:
                found = answers(prompts_of(seed, step + 1), step + 1, 1.0)
            else:
                with timeslice.hold(GROUP, phase="save"):  # a checkpoint reads every array
                    leaves = jax.device_get(jax.tree.leaves(state.policy))
                    np.savez(folder / "policy.npz", *leaves)
            jax.block_until_ready(state.policy)
    ended, digest = time.monotonic(), hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()
    return {"began": began, "ended": ended, "rewards": rewards, "evals": evals, "weights": digest, "bodies": bodies}


def warm(steps: int, seed: int) -> float:
    """Compile everything. Seconds of device work that a step takes."""
    import jax

    learner = Learner()
    params, adam = learner.fresh(seed)
    reference = learner.fresh(seed)[0]
    began = 0.0
    for step in range(steps + 1):
        began = began if step > 1 else time.monotonic()  # the first one compiles
        prompts = prompts_of(seed, step)
        found = jax.device_get(learner.generate(params, prompts, jax.random.key(step), 1.0))
        params, adam = learner.update(params, adam, reference, found, verify(prompts, found["token"], 0.0))
        jax.block_until_ready(params)
    return (time.monotonic() - began) / steps


def job(folder: Path, steps: int, seed: int) -> None:
    """The process of a job."""
    turns.serve(
        {
            "warm": lambda: warm(3, seed),
            "run": lambda verifier_s: learn(folder, steps, seed, float(verifier_s)),
        }
    )


def compare(names: Sequence[str], steps: int, verifier_s: float | None) -> dict[str, Any]:
    """Every job alone, then all together."""
    with turns.stack(GROUP) as (local, folder), ExitStack() as running:
        environment = {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),  # the runs compile the same
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        }

        def start(run: str, name: str) -> turns.Job:
            given = (folder / f"{run}-{name}", local.url, steps, names.index(name))
            made = turns.Job(__file__, name, *given, environment=environment)
            running.callback(made.end)
            made.ask("warm")
            return made

        alone = {}
        latency = verifier_s
        for name in names:
            first = start("alone", name)
            busy_s = first.answer()
            latency = busy_s if latency is None else latency
            first.ask("run", latency)
            alone[name] = first.answer()
            first.end()
            rewards = alone[name]["rewards"]
            say(f"job {name} alone: {busy_s:.2f} s of device work a step, reward {rewards[0]:.2f} to {rewards[-1]:.2f}")
        jobs = {name: start("sliced", name) for name in names}
        for each in jobs.values():
            each.answer()
        before = len(turns.events_of(local.url, GROUP))
        for each in jobs.values():
            each.ask("run", latency)
        sliced = {name: each.answer() for name, each in jobs.items()}
        events = turns.events_of(local.url, GROUP)[before:]
    return {
        **judge(alone, sliced, events),
        "steps": steps,
        "verifier_s": latency,
        "versions": turns.versions("jax", "jaxlib", "numpy"),
    }


def judge(alone: dict[str, Any], sliced: dict[str, Any], events: list[Any]) -> dict[str, Any]:
    """The numbers."""
    same = ("rewards", "evals", "weights")
    return {
        **turns.measured(alone, sliced, events),
        "results_equal": all(alone[name][key] == sliced[name][key] for name in alone for key in same),
        "runs": {
            name: {
                "alone_s": round(turns.seconds(alone[name]), 3),
                "sliced_s": round(turns.seconds(run), 3),
                **{key: run[key] for key in same},
            }
            for name, run in sliced.items()
        },
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="how many jobs (default 2)")
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="of each job (default 12)")
    parser.add_argument("--verifier", type=float, metavar="S", help="seconds a batch; default: as the device work")
    parser.add_argument("--json", type=turns.new_file, metavar="FILE", help="write the numbers there")
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not find_spec("jax"):
        raise SystemExit(
            "this example needs JAX: in a checkout: pip install '.[jax,demo]', or run it by scripts/frameworks"
        )
    if arguments.job:
        job(Path(arguments.job[0]), *map(int, arguments.job[1:]))
        return
    if arguments.jobs < 1 or arguments.steps < 1:
        parser.error("--jobs and --steps: at least 1")
    turns.end_on_signals()
    report = compare([f"ppo-{n}" for n in range(arguments.jobs)], arguments.steps, arguments.verifier)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print(
        f"one after the other {report['alone_s']:.1f} s, by turns {report['sliced_s']:.1f} s, gain "
        f"{report['gain']:.2f} (emulated: memory of a CPU); {report['swaps']} swaps, "
        f"{report['bytes_moved'] >> 20} MiB moved, overlaps {report['overlaps']}, results equal: "
        f"{report['results_equal']}"
    )
    sys.exit(not (report["results_equal"] and not report["overlaps"] and (report["swaps"] or arguments.jobs == 1)))


if __name__ == "__main__":
    main()
