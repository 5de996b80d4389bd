"""Host memory for state that is off the device, kept for the next time; and state that needs no copy the next time.

Making such memory takes longer than filling it: page-locked on CUDA, and of fresh pages elsewhere. So it stays, and
what was in it stays as well where the memory on the device is said not to change.

PyTorch can't tell that something changed. Its version counters rise for most changes in place, but not for those by
``.data``, by a fused optimizer, through numpy or through the storage (seen in PyTorch 2.13). So what did not change is
seen by its content.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from timeslice.integrations.torch_find import Piece, raw

_WORDS = {"cpu": 1 << 14}  # of eight bytes; so many are looked at together, that they stay in a CPU's cache
_WORDS_ON_DEVICE = 1 << 20  # and that a device has something to do
_MIX = 0x2545F4914F6CDD1D  # odd, with bits all over


@dataclass(eq=False)
class Saved:
    """A piece and its content in host memory."""

    piece: Piece
    content: Any
    mark: Mark | None  # of what is not to change
    copied: bool  # just now; else the content was here already

    @property
    def nbytes(self) -> int:
        return int(self.content.numel())


class HostMemory:
    """What of it is in use belongs to whoever saved; the rest is here."""

    def __init__(self, *, verify: bool) -> None:
        self._verify = verify
        self._spare: defaultdict[tuple[int, bool], list[Any]] = defaultdict(list)  # by size, page-locked
        self._kept: dict[int, tuple[Mark, Any]] = {}  # by storage

    @property
    def nbytes(self) -> int:
        spare = sum(size * len(contents) for (size, _), contents in self._spare.items())
        return int(spare + sum(content.numel() for _, content in self._kept.values()))

    def save(self, pieces: Iterable[Piece]) -> list[Saved]:
        """A copy of each, made only where there is none. If one can't be made, those that were are kept here."""
        self._sweep()
        done: list[Saved] = []
        try:
            for piece in pieces:
                done.append(self._save(piece))  # noqa: PERF401 - what is done counts when one fails
        except BaseException:
            for saved in done:
                self.give(saved)
            raise
        return done

    def give(self, saved: Saved) -> None:
        """It is on the device again."""
        if saved.mark:
            self._kept[saved.piece.storage._cdata] = (saved.mark, saved.content)  # noqa: SLF001 - as in torch_find
        else:
            self._lay_by(saved.content)

    def trim(self) -> None:
        """Forget what the last time had no use for."""
        self._spare.clear()

    def _save(self, piece: Piece) -> Saved:
        static = piece.tag == "static"
        mark, content = self._kept.pop(piece.storage._cdata, (None, None))  # noqa: SLF001
        if mark and static and mark.still_fits(piece):
            return Saved(piece, content, mark, copied=False)
        if content is not None:
            self._lay_by(content)
        content = self._take(piece.storage)
        content.copy_(raw(piece.storage))
        return Saved(piece, content, Mark(piece, verify=self._verify) if static else None, copied=True)

    def _take(self, storage: Any) -> Any:
        size, pinned = storage.nbytes(), storage.device.type == "cuda"
        spare = self._spare[size, pinned]
        return spare.pop() if spare else torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def _lay_by(self, content: Any) -> None:
        self._spare[content.numel(), content.is_pinned()].append(content)

    def _sweep(self) -> None:
        for key in [key for key, (mark, _) in self._kept.items() if mark.storage.expired()]:
            self._lay_by(self._kept.pop(key)[1])


class Mark:
    """What a piece was when it was copied, to be known again by."""

    def __init__(self, piece: Piece, *, verify: bool) -> None:
        self.storage = StorageWeakRef(piece.storage)  # no later storage has its address while this is there
        self._size = piece.storage.nbytes()
        self._tensors = [(weakref.ref(tensor), _version(tensor)) for tensor in piece.tensors]
        self._verify = verify
        self._fingerprint = fingerprint(piece.storage) if verify else None

    def still_fits(self, piece: Piece) -> bool:
        if self.storage.expired() or self._size != piece.storage.nbytes() or len(self._tensors) != len(piece.tensors):
            return False
        for (reference, version), tensor in zip(self._tensors, piece.tensors, strict=True):
            if reference() is not tensor or version != _version(tensor):
                return False
        if not self._verify:
            return all(version is not None for _, version in self._tensors)
        return self._fingerprint is not None and self._fingerprint == fingerprint(piece.storage)


def _version(tensor: Any) -> int | None:
    return None if tensor.is_inference() else int(tensor._version)  # noqa: SLF001 - documented, if not by its name


def fingerprint(storage: Any) -> int | None:
    """64 bits of the content, computed where it is. None when the device has no room for the 24 MiB it takes.

    Each word is made into another one by a map of its place's own that loses nothing: a change of one word always
    shows. What moves to another place shows as well, for words of few bits as of any: a sum of multiples would take
    1.0 in two places for the same.
    """
    content, device = raw(storage), storage.device
    whole = content.numel() // 8 * 8
    words = content[:whole].view(torch.int64)
    together = _WORDS.get(device.type, _WORDS_ON_DEVICE)
    try:
        rest = torch.zeros(8, dtype=torch.uint8, device=device)
        rest[: content.numel() - whole] = content[whole:]
        places = torch.arange(1, min(together, whole // 8) + 1, device=device)
        mixed, shifted = torch.empty_like(places), torch.empty_like(places)
        _mix(places, shifted)
        found = rest.view(torch.int64) + content.numel()
        for part in words.split(together):
            size = part.numel()
            torch.bitwise_xor(part, places[:size], out=mixed[:size])
            _mix(mixed[:size], shifted[:size])
            found = found * _MIX + mixed[:size].sum()
        return int(found.item())
    except torch.OutOfMemoryError:
        return None


def _mix(words: Any, shifted: Any) -> None:
    """Make each word another one, no two the same."""
    for bits in (32, 29):
        words.mul_(_MIX)
        torch.bitwise_right_shift(words, bits, out=shifted)
        words.bitwise_xor_(shifted.bitwise_and_((1 << (64 - bits)) - 1))  # shifts of PyTorch fill up with the sign
