"""What several folders of tests share."""

from __future__ import annotations
