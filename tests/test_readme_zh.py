"""README.zh-CN.md keeps up with README.md: the same Python, the same pages and pictures."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")


def test_the_python_is_the_same_but_for_its_comments() -> None:
    blocks, translated = (re.findall(r"```python\n(.*?)```", text, re.DOTALL) for text in (ENGLISH, CHINESE))
    assert [ast.dump(ast.parse(block)) for block in translated] == [ast.dump(ast.parse(block)) for block in blocks]
    for block, english in zip(translated, blocks, strict=True):
        comments = re.findall(r"(?:^|  )# (.*)", block, re.MULTILINE)
        assert len(comments) == len(re.findall(r"(?:^|  )# ", english, re.MULTILINE))
        assert [comment for comment in comments if not re.search("[\u4e00-\u9fff]", comment)] == []


def test_the_words_are_those_that_chinese_readers_know() -> None:
    first, _, rest = CHINESE.partition("\n\n[English]")[2].partition("\n\n")[2].partition("\n")
    assert "etcd" in first
    for word in (
        "严格递增",
        "先到先得",
        "名称",
        "自动续期，类似 Redisson 看门狗",
        "\n## 局限与不适用场景\n",
        "\n## 提供的保证\n",
    ):
        assert word in rest
    assert re.findall("只增不减|单调递增|先来先得|名字|保证什么|它不是什么", CHINESE) == []


def test_the_shell_commands_are_the_same() -> None:
    """Without their comments, which are Chinese."""
    commands, translated = (
        [
            re.sub(r"\s*# .*", "", line)
            for block in re.findall(r"```(?:sh|diff)\n(.*?)```", text, re.DOTALL)
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
