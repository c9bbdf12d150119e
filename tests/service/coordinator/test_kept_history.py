"""The log's history is kept before receipts are sent: each promises that its entry stays."""

from __future__ import annotations

import asyncio
import threading
from unittest.mock import Mock

import pytest

from coordinator.http.service import HistoryQueue


async def test_receipts_wait_for_the_history_and_make_it_be_kept_once() -> None:
    on_disk, coordinator = threading.Event(), Mock(is_history_due=True)

    def keep() -> None:
        on_disk.wait(20)
        coordinator.is_history_due = False

    coordinator.keep_history.side_effect = keep
    queue = HistoryQueue(coordinator)
    receipts = [asyncio.create_task(queue.kept()) for _ in range(5)]
    await asyncio.sleep(0.05)
    receipts.pop().cancel()  # one worker goes, and takes no other's with it
    receipts.append(asyncio.create_task(queue.kept()))
    await asyncio.sleep(0)
    assert not any(one.done() for one in receipts)
    on_disk.set()
    await asyncio.gather(*receipts)
    await queue.kept()
    assert coordinator.keep_history.call_count == 1


async def test_a_history_that_cannot_be_kept_is_tried_again_for_the_next_receipt() -> None:
    coordinator = Mock(is_history_due=True)
    coordinator.keep_history.side_effect = [OSError("no space"), None]
    queue = HistoryQueue(coordinator)
    with pytest.raises(OSError, match="no space"):
        await queue.kept()
    await queue.kept()
    assert coordinator.keep_history.call_count == 2
