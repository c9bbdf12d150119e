"""Blobs in an S3-compatible object store: `blobs/DIGEST` and `uploads/LEASE/SHA256` under the URL's prefix.

Endpoint, region and credentials are boto3's (AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID, profile, instance role); neither
they nor presigned URLs are logged. An offer is a presigned PUT (Signature Version 4) that signs the object's key,
Content-Length and x-amz-checksum-sha256, so that not even its sender can upload other bytes.

Not guaranteed for a store that does not verify the checksum: one that keeps none is detected when an upload is looked
up, one that keeps a wrong one when it is read. Both count as faults of the store.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from urllib3.exceptions import HTTPError

from coordinator.errors import BadConfiguration, CorruptRead, DamagedBlob, StorageFault, StoreAway
from coordinator.storage.blobs import BlobStream, Upload, UploadStore, check_name, checked_blob
from coordinator.storage.timings import metered
from shardcast.wire import digest

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

CONNECT_SECONDS: Final = 3.0
READ_SECONDS: Final = 20.0
ATTEMPTS: Final = 2
REREAD_SECONDS: Final = 0.2
CORRUPT_SECONDS = 120.0
"""How long an object that is read with other bytes is read again (CorruptRead) before it counts as damaged."""
MAX_CORRUPT: Final = 4096

MAX_CONNECTIONS: Final = 32

_URL: Final = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/[A-Za-z0-9._-]{1,100})*)/?")
_MISSING: Final = frozenset({"404", "NoSuchKey", "NotFound"})
_SETTINGS: Final = frozenset(
    {
        *("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "NoSuchBucket"),
        *("NoCredentialsError", "PartialCredentialsError"),
    }
)
"""Configuration errors, which retries do not fix: the store's error codes and boto3's exceptions."""


class S3Blobs(UploadStore):
    """Blob store at `url`, s3://BUCKET/PREFIX; thread-safe."""

    def __init__(self, url: str) -> None:
        found = _URL.fullmatch(url)
        if found is None or "/.." in url:
            raise BadConfiguration(
                "--blobs must be s3://BUCKET or s3://BUCKET/PREFIX, of letters, digits, '.', '_', '-'"
            )
        self.url = url.rstrip("/")
        self._bucket, prefix = found[1], found[2].strip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = _client()
        self._corrupt_since: dict[str, float] = {}

    @metered("put")
    def put(self, data: bytes) -> str:
        name = digest(data)
        with _typed_errors(f"put blob {name}"):
            self._client.put_object(
                Bucket=self._bucket,
                Key=self._blob(name),
                Body=data,
                ChecksumSHA256=_base64(hashlib.sha256(data).hexdigest()),
            )
        return name

    @metered("get")
    def get(self, name: str, *, max_bytes: int) -> bytes:
        check = partial(checked_blob, name=name, max_bytes=max_bytes)
        return self._read_checked(self._blob(name), check, max_bytes=max_bytes)

    def open_stream(self, name: str) -> BlobStream | None:
        try:
            with _typed_errors(f"get blob {name}"):
                found = self._client.get_object(Bucket=self._bucket, Key=self._blob(name))
        except StorageFault:
            return None
        body = found["Body"]

        def read(most: int) -> bytes:
            with _typed_errors(f"read blob {name}"):
                return body.read(most)

        return BlobStream(found["ContentLength"], read, body.close)

    def remove(self, name: str) -> None:
        self._delete(self._blob(name))

    def offer(self, upload: Upload, *, seconds: int) -> str:
        with _typed_errors("sign an offer"):
            return self._client.generate_presigned_url(
                "put_object",
                Params={
                    "Bucket": self._bucket,
                    "Key": self._upload(upload),
                    "ContentLength": upload.body_bytes,
                    "ChecksumAlgorithm": "SHA256",
                    "ChecksumSHA256": _base64(upload.sha256),
                },
                ExpiresIn=seconds,
                HttpMethod="PUT",
            )

    @metered("look")
    def holds(self, upload: Upload) -> bool:
        try:
            with _typed_errors(f"look for the upload of lease {upload.lease}"):
                head = self._client.head_object(Bucket=self._bucket, Key=self._upload(upload), ChecksumMode="ENABLED")
        except StorageFault:
            return False
        if "ChecksumSHA256" not in head:
            raise StoreAway("the object store keeps no SHA-256 checksums of what is uploaded, which this run needs")
        return head["ContentLength"] == upload.body_bytes and head["ChecksumSHA256"] == _base64(upload.sha256)

    @metered("fetch")
    def fetch(self, upload: Upload) -> bytes:
        def check(data: bytes) -> None:
            if len(data) != upload.body_bytes or hashlib.sha256(data).hexdigest() != upload.sha256:
                raise DamagedBlob(f"the store holds other bytes for lease {upload.lease} than it let be uploaded")

        return self._read_checked(self._upload(upload), check, max_bytes=upload.body_bytes)

    @metered("keep")
    def keep(self, upload: Upload, name: str) -> None:
        with _typed_errors(f"keep the upload of lease {upload.lease}"):
            self._client.copy_object(
                Bucket=self._bucket,
                Key=self._blob(name),
                CopySource={"Bucket": self._bucket, "Key": self._upload(upload)},
            )

    def discard(self, upload: Upload) -> None:
        self._delete(self._upload(upload))

    def begin(self, data: bytes) -> None:
        try:
            self.put(data)
        except StoreAway as error:
            cause = error.__cause__
            code = _code(cause) if isinstance(cause, ClientError) else type(cause).__name__
            if code in _SETTINGS:
                raise BadConfiguration(
                    f"the object store does not let this process write to {self.url} ({code}); see to the bucket, "
                    "AWS_ENDPOINT_URL_S3 and the credentials"
                ) from error
            raise

    def _blob(self, name: str) -> str:
        check_name(name)
        return f"{self._prefix}blobs/{name}"

    def _upload(self, upload: Upload) -> str:
        check_name(upload.lease)
        check_name(upload.sha256)
        return f"{self._prefix}uploads/{upload.lease}/{upload.sha256}"

    def _read_checked(self, key: str, check: Callable[[bytes], object], *, max_bytes: int) -> bytes:
        """Read `key` until `check` takes the bytes, at most ATTEMPTS times.

        Raises CorruptRead, and DamagedBlob once reads of it have been corrupt for CORRUPT_SECONDS.
        """
        attempts = 0
        while True:
            data = self._read(key, max_bytes=max_bytes)
            try:
                check(data)
            except DamagedBlob as error:
                attempts += 1
                since = self._corrupt_since.setdefault(key, time.monotonic())
                while len(self._corrupt_since) > MAX_CORRUPT:
                    self._corrupt_since.pop(next(iter(self._corrupt_since)), None)
                if time.monotonic() - since >= CORRUPT_SECONDS:
                    raise
                if attempts == ATTEMPTS:
                    raise CorruptRead(f"the object store sent other bytes than it was asked for: {error}") from error
                time.sleep(REREAD_SECONDS)
                continue
            self._corrupt_since.pop(key, None)
            return data

    def _read(self, key: str, *, max_bytes: int) -> bytes:
        with _typed_errors(f"get {key}"):
            found = self._client.get_object(Bucket=self._bucket, Key=key)
            with found["Body"] as body:
                if found["ContentLength"] > max_bytes:
                    raise StorageFault(f"{key} has more than {max_bytes} bytes")
                data = body.read(max_bytes + 1)
        if len(data) != found["ContentLength"]:
            raise StoreAway(f"the object store sent only part of {key}")
        return data

    def _delete(self, key: str) -> None:
        with _typed_errors(f"remove {key}"):
            self._client.delete_object(Bucket=self._bucket, Key=key)


def _client() -> S3Client:
    settings = Config(
        signature_version="s3v4",  # older versions do not sign the length
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        max_pool_connections=MAX_CONNECTIONS,
        retries={"total_max_attempts": ATTEMPTS, "mode": "standard"},
        # Other stores do not support boto3's default checksums; the needed ones are requested explicitly.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"} if _has_own_endpoint() else None,
    )
    try:
        client: S3Client = boto3.session.Session().client("s3", config=settings)
    except (BotoCoreError, ValueError) as error:
        raise BadConfiguration(f"the object store's settings are incomplete: {error}") from error
    return client


def _has_own_endpoint() -> bool:
    """Return whether the store is not Amazon's; others seldom support virtual-hosted buckets."""
    return bool(os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"))


@contextmanager
def _typed_errors(operation: str) -> Iterator[None]:
    """Raise StorageFault for a missing object, StoreAway for every other failure of the store."""
    try:
        yield
    except ClientError as error:
        if _code(error) in _MISSING:
            raise StorageFault(f"the object store could not {operation}: no such object") from error
        raise StoreAway(f"the object store refuses to {operation}: {_code(error)}") from error
    except (BotoCoreError, HTTPClientError, HTTPError, OSError) as error:
        raise StoreAway(f"the object store cannot be reached to {operation}: {type(error).__name__}") from error


def _code(error: Exception) -> str:
    """Return a ClientError's code, sanitised for logs, since the store chose it."""
    code = getattr(error, "response", {}).get("Error", {}).get("Code", "")
    return re.sub(r"[^A-Za-z0-9]", "", str(code))[:64]


def _base64(hexadecimal: str) -> str:
    return base64.b64encode(bytes.fromhex(hexadecimal)).decode()
