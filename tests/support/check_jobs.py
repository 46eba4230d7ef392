"""A check job to be configured: a folder with a log, a listener's module and a configuration."""

from __future__ import annotations

from pathlib import Path

from rmq_spark import CommitLog

LISTENERS = """
from rmq_spark import COMMIT_MESSAGE, UNKNOWN, TransactionListener
from rmq_spark._core.checks.policy import TransactionCheckListener

class Orders(TransactionListener):
    def execute_local_transaction(self, batch):
        raise AssertionError

    def check_local_transaction(self, batch):
        if batch.batch_id == 1:
            raise RuntimeError("the bank\\nis \\x1b[31mclosed")
        return UNKNOWN if batch.batch_id == 2 else COMMIT_MESSAGE

class Mail(TransactionCheckListener):
    def resolve_discarded(self, batch, reason):
        return COMMIT_MESSAGE

def listener():
    return Orders()

class Sparky(Orders):
    requires_spark = True
"""


def make_folder(folder: Path) -> Path:
    """Make the log ``log`` with the topic ``orders``, the module ``shop_orders`` and the file ``txmq.toml``."""
    CommitLog.create(folder / "log").create_topic("orders", queues=1)
    (folder / "shop_orders.py").write_text(LISTENERS)
    write(folder)
    return folder


def write(folder: Path, check: str = 'transactionTimeout = "0s"', more: str = "", listener: str | None = None) -> Path:
    """Write the configuration, and return its file."""
    file = folder / "txmq.toml"
    file.write_text(
        f'path = "{folder / "log"}"\nlistener_modules = ["shop_orders"]\n'
        f'[listeners]\n"order-service" = "{listener or "shop_orders:listener"}"\n[check]\n{check}\n{more}'
    )
    return file
