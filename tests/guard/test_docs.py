"""The examples of docs/guard.md, run as they stand, one after the other in one program."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import redis

from tests.servers import Server

PAGE = (Path(__file__).parent.parent.parent / "docs" / "guard.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SQL = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_run(server: Server, admin: redis.Redis, tmp_path: Path) -> None:
    program = (
        "\n".join(PYTHON).replace("6379", str(server.port)) + "\nconnection.close()\nclient.close()\nstore.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert done.stdout == "", "the message comes in time, so nothing is refused"
    assert admin.get("state:42") == b"returned"
    assert admin.hgetall("items:42") == {b"apples": b"3", b"pears": b"1"}
    assert (tmp_path / "report.json").read_text() == '{"total": 3}\n'
    with sqlite3.connect(tmp_path / "orders.db") as connection:
        assert connection.execute("SELECT id, state FROM orders").fetchall() == [(42, "sent")]
    connection.close()


def test_the_recipe_by_hand_keeps_the_rule() -> None:
    create, update = SQL
    connection = sqlite3.connect(":memory:")
    connection.execute(create)
    connection.execute("INSERT INTO orders (id) VALUES (42)")
    for state, fence, holder, taken in (
        ("paid", 7, "a", 1),
        ("again", 7, "a", 1),
        ("other", 7, "b", 0),
        ("sent", 8, "b", 1),
        ("stale", 7, "a", 0),
    ):
        facts = {"id": 42, "state": state, "fence": fence, "holder": holder}
        assert connection.execute(update, facts).rowcount == taken
    assert connection.execute("SELECT state FROM orders").fetchone() == ("sent",)
    connection.close()
