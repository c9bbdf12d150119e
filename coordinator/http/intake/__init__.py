"""Receiving submission bodies and serving evidence: one port, and one implementation per kind of blob store."""

from __future__ import annotations

from coordinator.errors import BadConfiguration
from coordinator.http.intake.base import Intake, Submitter
from coordinator.http.intake.by_folder import FolderIntake
from coordinator.http.intake.by_store import StoreIntake
from coordinator.http.write_queue import WriteQueue
from coordinator.run.service import Coordinator
from coordinator.storage.blobs import UploadStore
from coordinator.storage.folder_blobs import FolderBlobs

__all__ = ["Intake", "Submitter", "intake_of"]


def intake_of(coordinator: Coordinator, writes: WriteQueue) -> Intake:
    """Return the implementation for the run's blob store."""
    match coordinator.home.blobs:
        case UploadStore() as store:
            return StoreIntake(coordinator, store)
        case FolderBlobs() as blobs:
            return FolderIntake(coordinator, blobs, writes)
        case other:
            raise BadConfiguration(f"no intake for blob store {type(other).__name__}")
