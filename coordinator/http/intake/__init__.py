"""How the bodies of submissions come in and evidence goes out: one port, and a strategy for each kind of blob store."""

from __future__ import annotations

from coordinator.errors import BadConfiguration
from coordinator.http.intake.base import Intake, Submitter
from coordinator.http.intake.by_folder import FolderIntake
from coordinator.http.intake.by_store import StoreIntake
from coordinator.run.service import Coordinator
from coordinator.storage.blobs import UploadStore
from coordinator.storage.folder_blobs import FolderBlobs

__all__ = ["Intake", "Submitter", "intake_of"]


def intake_of(coordinator: Coordinator) -> Intake:
    """Return the strategy that fits the run's blob store."""
    match coordinator.home.blobs:
        case UploadStore() as store:
            return StoreIntake(coordinator, store)
        case FolderBlobs() as blobs:
            return FolderIntake(coordinator, blobs)
        case other:
            raise BadConfiguration(f"nothing is known of taking bodies into a {type(other).__name__}")
