"""The listeners of docs/http-api.md, with a partner that refuses orders, is down, or takes one and loses its answer."""

from __future__ import annotations

import http.server
import importlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pyarrow as pa
import pytest

import rmq_spark as txmq
from rmq_spark.testing import InMemoryCommitLog

PAGE = Path(__file__).parents[2] / "docs" / "http-api.md"
FILE, AGAIN, INTENTS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


class Partner(http.server.BaseHTTPRequestHandler):
    """Takes each order once by its key, when it is well."""

    has: ClassVar[dict[str, Any]] = {}
    mood = "well"

    def do_POST(self) -> None:
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if Partner.mood == "down":
            return self.send_error(503)
        if order["total"] <= 0:
            return self.send_error(422)
        self.has.setdefault(self.headers["Idempotency-Key"], order)
        if Partner.mood != "loses answers":
            self.answer(201)
        return None

    def do_GET(self) -> None:
        if Partner.mood == "down":
            return self.send_error(503)
        return self.answer(200 if self.path.rpartition("/")[2] in self.has else 404)

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The page's module, with a partner on this machine."""
    name = FILE.partition("# file: ")[2].split("\n")[0]
    (tmp_path / name).write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Partner.has.clear()
    Partner.mood = "well"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Partner)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PARTNER_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("PARTNER_TOKEN", "from a vault")
    sys.modules.pop("partner_orders", None)
    yield importlib.import_module("partner_orders")
    sys.modules.pop("partner_orders", None)
    server.shutdown()
    server.server_close()


@pytest.fixture
def log() -> InMemoryCommitLog:
    return InMemoryCommitLog(topics={"orders": 1})


@pytest.fixture
def send(page: ModuleType, log: InMemoryCommitLog) -> Iterator[Callable[..., Any]]:
    listener = page.listener()
    with txmq.TransactionMQProducer(
        log, "partner", listener, check_interval=None, on_listener_error="fail"
    ) as producer:

        def send(name: str, **orders: int) -> Any:
            table = pa.table({"k": list(orders), "body": [json.dumps({"total": total}) for total in orders.values()]})
            return producer.send_messages_in_transaction(
                table, topic="orders", transaction_key="k", idempotency_key=name
            )

        yield send


def check(log: InMemoryCommitLog, listener: txmq.TransactionListener) -> Any:
    return txmq.CheckService(log.another(), {"partner": listener}, transaction_timeout=0).run_once()


def visible(log: InMemoryCommitLog) -> list[int]:
    return sorted(json.loads(body)["total"] for body in log.read("orders")["body"].to_pylist())


def at_the_partner() -> list[int]:
    return sorted(order["total"] for order in Partner.has.values())


def test_what_the_partner_refuses_is_not_visible(send: Callable[..., Any], log: InMemoryCommitLog) -> None:
    send("first", a=10, b=-1)
    assert visible(log) == at_the_partner() == [10]


def test_a_check_finds_an_order_of_which_the_answer_was_lost(
    page: ModuleType, send: Callable[..., Any], log: InMemoryCommitLog
) -> None:
    Partner.mood = "loses answers"
    with pytest.raises(txmq.errors.LocalTransactionError):
        send("second", a=20)
    assert visible(log) == []
    Partner.mood = "well"
    check(log, page.listener())
    assert visible(log) == at_the_partner() == [20]


def test_an_order_that_never_came_is_posted_again_under_its_key_once_a_check_dares_to_say_so(
    page: ModuleType, send: Callable[..., Any], log: InMemoryCommitLog
) -> None:
    Partner.mood = "down"
    with pytest.raises(txmq.errors.LocalTransactionError):
        send("third", a=30)
    assert check(log, page.listener()).unknown.transactions == 1
    Partner.mood = "well"
    assert check(log, page.listener()).unknown.transactions == 1  # 404, and too early to be sure
    patient = page.PartnerListener(page.os.environ["PARTNER_URL"], "token", rollback_after_s=0)
    assert check(log, patient).rolled_back.transactions == 1
    again = send("third", a=30)
    assert again.replayed
    assert again.local_transaction_state == txmq.COMMIT_MESSAGE
    assert visible(log) == at_the_partner() == [30]


def test_a_check_that_posts_again_need_not_guess(
    page: ModuleType, send: Callable[..., Any], log: InMemoryCommitLog
) -> None:
    found: dict[str, Any] = {"partner_orders": page}
    exec(compile(AGAIN, str(PAGE), "exec"), found)
    Partner.mood = "down"
    with pytest.raises(txmq.errors.LocalTransactionError):
        send("fourth", a=40)
    Partner.mood = "well"
    check(log, found["PostAgain"](page.os.environ["PARTNER_URL"], "token"))
    assert visible(log) == at_the_partner() == [40]


def test_intents_make_a_rollback_true_without_a_clock(page: ModuleType, log: InMemoryCommitLog) -> None:
    found: dict[str, Any] = {"partner_orders": page, "txmq": txmq}
    exec(compile(INTENTS, str(PAGE), "exec"), found)
    intents = found["WithIntents"](page.listener())
    many = txmq.PerMessageListener(intents, threads=16)
    bodies = [json.dumps({"total": total}).encode() for total in (50, -1, 60, 70)]
    with txmq.TransactionMQProducer(log, "partner", many, check_interval=None) as sender:
        messages = [txmq.Message("orders", body) for body in bodies]
        sender.send_messages_in_transaction(messages, transaction_per="message")
        assert visible(log) == at_the_partner() == [50, 60, 70]
        assert log.pending().num_rows == 0

        Partner.mood = "down"
        sender.send_message_in_transaction(txmq.Message("orders", b'{"total": 80}'))
    Partner.mood = "well"
    assert check(log, many).unknown.transactions == 1  # its intent is there, and the partner has nothing
    message = type("Message", (), {"transaction_id": "late", "msg_id": "late", "body": b'{"total": 90}'})
    assert intents.check_local_transaction(message) == txmq.ROLLBACK_MESSAGE
    assert intents.execute_local_transaction(message, None) == txmq.UNKNOWN  # the late driver posts nothing
    assert at_the_partner() == [50, 60, 70]
