"""Takes secrets out of what a person may send to strangers: a report for a bug."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

from timeslice.addresses import redact_url

HIDDEN = "***"
# Fields whose value is hidden whatever it is. `token` as a whole word alone is a fencing token, a mere number.
_SECRET_NAME = re.compile(
    r"passw|passphrase|secret|credential|api_?key|private_?key|auth(?!_|or)|bearer|(?:auth|access|api|refresh)_?token",
    re.IGNORECASE,
)
# In a text: name, separator, value.
_SECRET_TEXT = re.compile(
    r"((?:pass(?:word|wd|phrase)?|secret|credentials?|api[_-]?key|private[_-]?key|(?:access|auth|api)[_-]?token|bearer)"
    r"[\"']?\s*[=:\s]\s*[\"']?)([^\s\"'&,;]+)",
    re.IGNORECASE,
)
# Free text that users' programs chose: it may hold anything, and explains no bug.
_FREE_TEXT = frozenset({"label", "job_phase"})
_SHORTEST = 4  # a shorter password would be found in half of all words


class Redactor:
    """``clean`` gives a copy without secrets; ``hidden`` counts what was taken out, by kind."""

    def __init__(self, known: Iterable[str | None]) -> None:
        secrets = {secret for secret in known if secret and len(secret) >= _SHORTEST}
        forms = {
            form for secret in secrets for form in (secret, quote(secret, safe=""), quote(secret), quote_plus(secret))
        }
        # Longest first: one may be part of another.
        self._known = sorted(forms | {repr(form)[1:-1] for form in forms}, key=len, reverse=True)
        self.hidden: Counter[str] = Counter()

    def clean(self, value: Any, name: str = "") -> Any:
        """A document, list or text without secrets; numbers and the like as they are."""
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.clean(each, self._field(str(key))) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.clean(each, name) for each in value]
        if isinstance(value, bytes):
            value = value.decode(errors="replace")
        if not isinstance(value, str):
            return value
        if value and name in _FREE_TEXT:
            self.hidden["labels of holds"] += 1
            return HIDDEN
        if value and _SECRET_NAME.search(name):
            self.hidden["fields named like a secret"] += 1
            return HIDDEN
        return self.text(value)

    @staticmethod
    def _field(key: str) -> str:
        """Hashes in Redis have fields such as ``waiter/label``."""
        return key.rpartition("/")[2]

    def text(self, text: str) -> str:
        """A text without known secrets, passwords of URLs, and what looks like ``password=...``."""
        for secret in self._known:
            if secret in text:
                self.hidden["passwords of this command's own settings"] += text.count(secret)
                text = text.replace(secret, HIDDEN)
        lines = "\n".join(redact_url(line) for line in text.split("\n"))
        if lines != text:
            self.hidden["passwords in addresses"] += 1
        cleaned, count = _SECRET_TEXT.subn(rf"\g<1>{HIDDEN}", lines)
        self.hidden["texts such as password=..."] += count
        return cleaned
