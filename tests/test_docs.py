"""The Python in README.md and docs/ runs as it is printed.

The blocks of one page run in order in one process, as a reader would type them,
beside a real `timeslice up`.
A block that can't run says why in a comment on the line before it: ``<!-- not run: reason -->``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
GROUPS = ("trainer-group", "sampler-group")  # used by some page, beside those that `up` serves anyway
RUNNER = """
import pathlib, sys
sys.path.insert(0, sys.argv[3])
from tests.test_docs import blocks_of
page = pathlib.Path(sys.argv[1])
for block in blocks_of(page.read_text()):
    if block.not_run is None:
        # Blank lines before it make a traceback show the page's own line numbers.
        exec(compile("\\n" * block.line + block.code, sys.argv[2], "exec"), globals())
"""


class Block(NamedTuple):
    """One fenced piece of Python; ``line`` is the number of its fence."""

    line: int
    code: str
    not_run: str | None


def blocks_of(page: str) -> list[Block]:
    """Find the ``python`` blocks of a Markdown page, and the reasons of those that are not to run."""
    found: list[Block] = []
    lines = page.splitlines()
    previous = ""
    number = 0
    while number < len(lines):
        line = lines[number]
        if fence := re.match(r"\s*(`{3,}|~{3,})(.*)", line):
            end = number + 1
            while end < len(lines) and lines[end].strip() != fence[1]:
                end += 1
            if fence[2].split() and fence[2].split()[0] == "python":
                reason = re.fullmatch(r"\s*<!-- not run: (\S.*) -->\s*", previous)
                code = textwrap.dedent("\n".join(lines[number + 1 : end]))
                found.append(Block(number + 1, code, reason[1] if reason else None))
            number = end
        elif line.strip():
            previous = line
        number += 1
    return found


def pages() -> list[Path]:
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in every if any(block.not_run is None for block in blocks_of(page.read_text()))]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment of a shell in which `timeslice up` runs."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIMESLICE_")}
    environment["TIMESLICE_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("up"))
    command = [str(Path(sys.executable).with_name("timeslice")), "up"]
    for group in GROUPS:
        command += ["--group", group]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            seen = []
            for line in process.stdout:
                seen.append(line)
                if match := re.search(r"export TIMESLICE_URL=(\S+)", line):
                    break
            else:
                pytest.fail("`timeslice up` printed no URL:\n" + "".join(seen))
            yield environment | {"TIMESLICE_URL": match[1].strip("'\"")}
        finally:
            process.terminate()


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page: Path, up: dict[str, str], tmp_path: Path) -> None:
    """A reader who copies the page's Python, block after block, sees no error."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUNNER, page, page.name, ROOT],
        env=up,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert run.returncode == 0, f"{page.name}:\n{run.stdout}{run.stderr}"


def test_the_readme_has_code_that_runs() -> None:
    """The first page shows at least one example, and it is among those run."""
    assert ROOT / "README.md" in pages()


PAGE = """\
Text.

```python
a = 1
```

<!-- not run: needs a cluster -->

```python
import cluster
```

<!-- not run: -->
~~~python title="x"
b = 2
~~~

````markdown
```python
shown, not meant
```
````

```bash
timeslice up
```

1. In a list:

   ```python
   if a:
       c = 3
   ```
"""


def test_blocks_are_found_where_a_reader_sees_them() -> None:
    """Only Python fences count, also indented ones, and only a comment with a reason excuses one."""
    assert blocks_of(PAGE) == [
        Block(3, "a = 1", None),
        Block(9, "import cluster", "needs a cluster"),
        Block(14, "b = 2", None),
        Block(30, "if a:\n    c = 3", None),
    ]


def test_a_failing_block_is_reported_with_the_pages_line(tmp_path: Path) -> None:
    """When a block fails, the traceback names the page and the line in it; later blocks see earlier names."""
    page = tmp_path / "page.md"
    page.write_text("```python\na = 0\n```\ntext\n```python\n\n1 / a\n```\n")
    run = subprocess.run(
        [sys.executable, "-c", RUNNER, page, page.name, ROOT], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert 'File "page.md", line 7' in run.stderr
    assert "ZeroDivisionError" in run.stderr
