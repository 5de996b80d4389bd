"""The mathematics of one job: a small policy, its samples and its updates, all in memory that is handed in.

The policy is asked for a pair (a, b) and writes three tokens: a+b, a-b and a*b, each modulo m. It is a network
``relu(relu(x E) W) V + c`` over a multi-hot x of a, b, the position and the token before. The wide base W is frozen,
like a pretrained model; E, V and c are trained by GRPO with a reward for each token (advantages relative to the
group of samples of one prompt, clipped importance ratio, Adam).
Nothing here keeps state of its own: what a later step needs lies in the arrays, randomness comes from seed and step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
Allocate = Callable[[tuple[int, ...], DTypeLike], Array]  # gives a zeroed array

TOKENS = 3  # an answer's length
_BETA1, _BETA2, _EPSILON = 0.9, 0.99, 1e-8


@dataclass(frozen=True)
class Work:
    """Sizes and settings of a job."""

    modulus: int = 5
    width: int = 2048
    prompts: int = 64  # in a batch
    samples: int = 16  # of each prompt: a group of GRPO
    minibatches: int = 8  # of a new batch, one Adam step each
    replayed: int = 8  # prompts of the batch before that are trained on once more, first
    rate: float = 2e-3
    clip: float = 0.2
    seed: int = 0
    dtype: str = "float32"

    @property
    def batch(self) -> int:
        """Samples in a batch."""
        return self.prompts * self.samples

    @property
    def inputs(self) -> int:
        """Length of the multi-hot input: a, b, position, token before (or none)."""
        return 2 * self.modulus + TOKENS + self.modulus + 1

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        return self.inputs * self.width + self.width * self.modulus + self.modulus

    def random(self, purpose: str, step: int = 0) -> np.random.Generator:
        """A generator of its own for each purpose and step, so that none has to be kept."""
        return np.random.default_rng([self.seed, *purpose.encode(), step])


@dataclass(frozen=True)
class Rollouts:
    """A batch of answers, one row a sample; the samples of a prompt stand together."""

    prompts: Array  # (batch, 2): a and b
    tokens: Array  # (batch, TOKENS)
    logps: Array  # (batch, TOKENS): log-probability of each token when it was drawn

    def part(self, start: int, stop: int) -> Rollouts:
        return Rollouts(self.prompts[start:stop], self.tokens[start:stop], self.logps[start:stop])

    def copy(self) -> Rollouts:
        return Rollouts(self.prompts.copy(), self.tokens.copy(), self.logps.copy())

    def put(self, other: Rollouts) -> None:
        """Overwrite in place."""
        self.prompts[:], self.tokens[:], self.logps[:] = other.prompts, other.tokens, other.logps

    @staticmethod
    def room(work: Work, allocate: Allocate, size: int) -> Rollouts:
        return Rollouts(
            allocate((size, 2), np.int32), allocate((size, TOKENS), np.int32), allocate((size, TOKENS), work.dtype)
        )


def initial_base(work: Work) -> Array:
    """The frozen part, the same for all who know the seed."""
    draw = work.random("base").standard_normal((work.width, work.width), dtype=np.float32)
    draw *= (2 / work.width) ** 0.5
    return draw.astype(work.dtype, copy=False)


def initial_trained(work: Work) -> Array:
    """Trained parameters at the start; the head is zero, so every answer is equally likely at first."""
    flat = np.zeros(work.trained, work.dtype)
    embedding, _, _ = unpack(work, flat)
    embedding[:] = 0.5 * work.random("embedding").standard_normal(embedding.shape)
    return flat


def unpack(work: Work, flat: Array) -> tuple[Array, Array, Array]:
    """E, V and c as views of the flat parameters."""
    first, second = work.inputs * work.width, (work.inputs + work.modulus) * work.width
    return (
        flat[:first].reshape(work.inputs, work.width),
        flat[first:second].reshape(work.width, work.modulus),
        flat[second:],
    )


def encode(work: Work, prompts: Array, position: Array | int, before: Array | None) -> Array:
    """Multi-hot rows. ``before`` None: nothing was written yet."""
    m, rows = work.modulus, np.arange(len(prompts))
    x = np.zeros((len(prompts), work.inputs), work.dtype)
    x[rows, prompts[:, 0]] = 1
    x[rows, m + prompts[:, 1]] = 1
    x[rows, 2 * m + position] = 1
    x[rows, 2 * m + TOKENS + (m if before is None else before)] = 1
    return x


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def advantages(work: Work, rewards: Array) -> Array:
    """Of each token against those at its place in the other samples of the prompt, in standard deviations."""
    groups = rewards.reshape(-1, work.samples, TOKENS)
    centred = groups - groups.mean(axis=1, keepdims=True)
    result: Array = (centred / (groups.std(axis=1, keepdims=True) + 1e-4)).reshape(-1, TOKENS)
    return result


class Sampler:
    """What a job has on the samplers: the base, a copy of the trained parameters, activations, its rollouts."""

    def __init__(self, work: Work, allocate: Allocate) -> None:
        self.work = work
        self.base = allocate((work.width, work.width), work.dtype)
        self.trained = allocate((work.trained,), work.dtype)
        self.first = allocate((work.batch, work.width), work.dtype)
        self.second = allocate((work.batch, work.width), work.dtype)
        self.rollouts = Rollouts.room(work, allocate, work.batch)

    def load(self) -> None:
        """Fill a fresh device."""
        self.base[:] = initial_base(self.work)
        self.trained[:] = initial_trained(self.work)

    def generate(self, step: int) -> Rollouts:
        """Draw a batch of answers, token by token. Returns a copy to send away."""
        work, own = self.work, self.rollouts
        random = work.random("generate", step)
        pairs = random.integers(0, work.modulus, (work.prompts, 2), dtype=np.int32)
        own.prompts[:] = np.repeat(pairs, work.samples, axis=0)
        embedding, head, bias = unpack(work, self.trained)
        rows, before = np.arange(work.batch), None
        for position in range(TOKENS):
            np.matmul(encode(work, own.prompts, position, before), embedding, out=self.first)
            np.maximum(self.first, 0, out=self.first)
            np.matmul(self.first, self.base, out=self.second)
            np.maximum(self.second, 0, out=self.second)
            logps = log_softmax(self.second @ head + bias)
            thresholds = np.exp(logps).cumsum(axis=1)
            before = (random.random((work.batch, 1)) * thresholds[:, -1:] > thresholds).sum(axis=1)
            own.tokens[:, position] = before
            own.logps[:, position] = logps[rows, before]
        return own.copy()


class Trainer:
    """What a job has on the trainers: base, trained parameters, Adam's moments, activations, the batch before."""

    def __init__(self, work: Work, allocate: Allocate) -> None:
        self.work = work
        largest = max(work.batch // work.minibatches, work.replayed * work.samples) * TOKENS
        self.base = allocate((work.width, work.width), work.dtype)
        self.trained = allocate((work.trained,), work.dtype)
        self.gradient = allocate((work.trained,), work.dtype)
        self.moment1 = allocate((work.trained,), work.dtype)
        self.moment2 = allocate((work.trained,), work.dtype)
        self.updates = allocate((1,), np.int64)
        self.first = allocate((largest, work.width), work.dtype)
        self.second = allocate((largest, work.width), work.dtype)
        self.backward = allocate((largest, work.width), work.dtype)
        self.replay = Rollouts.room(work, allocate, work.replayed * work.samples)
        self.replay_advantages = allocate((work.replayed * work.samples, TOKENS), work.dtype)

    def load(self) -> None:
        """Fill a fresh device."""
        self.base[:] = initial_base(self.work)
        self.trained[:] = initial_trained(self.work)

    def train(self, rollouts: Rollouts, rewards: Array) -> Array:
        """One update of GRPO. Returns the new parameters as a copy to send to the sampler."""
        work = self.work
        gains = advantages(work, rewards).astype(work.dtype)
        if self.updates[0]:
            self._step(self.replay, self.replay_advantages)
        size = work.batch // work.minibatches
        for start in range(0, size * work.minibatches, size):
            self._step(rollouts.part(start, start + size), gains[start : start + size])
        kept = work.replayed * work.samples
        self.replay.put(rollouts.part(0, kept))
        self.replay_advantages[:] = gains[:kept]
        return self.trained.copy()

    def loss(self, batch: Rollouts, gains: Array) -> float:
        """The clipped objective of GRPO, negated; leaves its gradient in ``gradient``."""
        work, count = self.work, batch.tokens.size
        first, second, backward = self.first[:count], self.second[:count], self.backward[:count]
        embedding, head, bias = unpack(work, self.trained)
        d_embedding, d_head, d_bias = unpack(work, self.gradient)

        x = encode(work, *_teacher_forced(work, batch))
        np.maximum(np.matmul(x, embedding, out=first), 0, out=first)
        np.maximum(np.matmul(first, self.base, out=second), 0, out=second)
        logps = log_softmax(second @ head + bias)

        rows, tokens = np.arange(count), batch.tokens.reshape(-1)
        gain = gains.reshape(-1)
        ratio = np.exp(logps[rows, tokens] - batch.logps.reshape(-1))
        free, clipped = ratio * gain, np.clip(ratio, 1 - work.clip, 1 + work.clip) * gain
        loss = -np.minimum(free, clipped).mean()

        weight = np.where(free <= clipped, free, 0) / -count  # where the clip binds, no gradient flows
        d_logits = -weight[:, None] * np.exp(logps)
        d_logits[rows, tokens] += weight
        np.matmul(second.T, d_logits, out=d_head)
        d_bias[:] = d_logits.sum(axis=0)
        np.multiply(d_logits @ head.T, second > 0, out=backward)
        np.matmul(backward, self.base.T, out=second)
        np.multiply(second, first > 0, out=backward)
        np.matmul(x.T, backward, out=d_embedding)
        return float(loss)

    def _step(self, batch: Rollouts, gains: Array) -> None:
        self.loss(batch, gains)
        self.updates += 1
        time = int(self.updates[0])
        self.moment1 += (1 - _BETA1) * (self.gradient - self.moment1)
        self.moment2 += (1 - _BETA2) * (self.gradient**2 - self.moment2)
        rate = self.work.rate * (1 - _BETA2**time) ** 0.5 / (1 - _BETA1**time)
        self.trained -= rate * self.moment1 / (np.sqrt(self.moment2) + _EPSILON)


def _teacher_forced(work: Work, batch: Rollouts) -> tuple[Array, Array, Array]:
    """Prompts, positions and tokens before, one row a token."""
    before = np.full(batch.tokens.shape, work.modulus, batch.tokens.dtype)
    before[:, 1:] = batch.tokens[:, :-1]
    prompts = np.repeat(batch.prompts, TOKENS, axis=0)
    return prompts, np.tile(np.arange(TOKENS), len(batch.tokens)), before.reshape(-1)
