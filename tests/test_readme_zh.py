"""README.zh-CN.md keeps up with README.md: the same Python, the same pages and pictures."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")


def test_the_python_is_the_same() -> None:
    """To the letter, so that test_readme.py runs these blocks, too."""
    blocks, translated = (re.findall(r"```python\n(.*?)```", text, re.DOTALL) for text in (ENGLISH, CHINESE))
    assert translated == blocks


def test_the_shell_commands_are_the_same() -> None:
    """Without their comments, which are translated."""
    commands, translated = (
        [
            re.sub(r"\s*# .*", "", line)
            for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
            for line in block.splitlines()
        ]
        for text in (ENGLISH, CHINESE)
    )
    assert translated == commands


def test_the_calls_and_links_are_the_same() -> None:
    calls, translated = (re.findall(r"^\| (`[^|]+`) \|", text, re.MULTILINE) for text in (ENGLISH, CHINESE))
    assert [row.replace("、", ", ") for row in translated] == calls
    english, chinese = (set(re.findall(r"\]\(([^)\s]+)\)", text)) for text in (ENGLISH, CHINESE))
    assert chinese - {"README.md"} == english - {"README.zh-CN.md"}


def test_the_two_link_to_each_other_at_the_top() -> None:
    assert "(README.zh-CN.md)" in "".join(ENGLISH.splitlines()[:4])
    assert "(README.md)" in "".join(CHINESE.splitlines()[:4])
