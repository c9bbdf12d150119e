"""Backups of a run that is being served, in one format for both kinds of database and every store of blobs.

A backup is a folder:

    manifest.json                           what belongs to it (`manifest.Manifest`)
    tables/<generation>/<name>.jsonl.zst    a JSON array a row, by the columns that the manifest names; bytes in base64
    blobs/<xx>/<digest>                     every blob that a row refers to, and the run's rules
    lock                                    held by the process that writes a backup here

All tables are of one snapshot of the database; blobs are copied after it, and are never removed while a row refers to
them. The manifest is replaced last, and by renaming: a backup that was killed leaves the one before it. A blob that is
there is not copied again, so that the next backup into the same folder costs what has changed.

Not in it: the run's key and the trainer's folder; nonces, for which `restoring` makes up; and the inner nodes of the
log, which follow from its entries. A backup proves that it is whole, not who wrote it: it has a checksum, and no
signature. Whoever can write to it can write to the run that is restored from it.
"""
