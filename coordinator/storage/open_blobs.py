"""Selects the backend of `coordinator.storage.blobs`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from coordinator.errors import BadConfiguration
from coordinator.storage.blobs import BlobStore
from coordinator.storage.folder_blobs import FolderBlobs
from node.runtime.extras import install_hint


def open_blobs(url: str | None, folder: Path, *, create: bool = False) -> BlobStore:
    """Return the store at `url`, or the one in the data folder, which is made to `create`; raises BadConfiguration."""
    if url is None:
        return FolderBlobs(folder / "blobs", create=create)
    if not url.startswith("s3://"):
        raise BadConfiguration("--blobs must be s3://BUCKET or s3://BUCKET/PREFIX; without it, blobs lie in --data")
    if find_spec("boto3") is None:
        raise BadConfiguration(
            f"the run's blobs are in an object store, for which this machine needs boto3: {install_hint('s3')}"
        )
    from coordinator.storage.s3_blobs import S3Blobs  # noqa: PLC0415  (boto3 takes long to import, and may be missing)

    return S3Blobs(url)
