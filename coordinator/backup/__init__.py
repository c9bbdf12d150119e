"""Back up a run while it is served, and restore it, with one format for every database and blob store.

A backup is a folder:

    manifest.json                           its content (`manifest.BackupManifest`)
    tables/<generation>/<name>.jsonl.zst    one JSON array per row, by the manifest's columns; bytes in base64
    blobs/<xx>/<digest>                     every blob that a row refers to, and the run's rules
    datasets/<digest>.dataset               every dataset of the run's that its data folder has
    lock                                    held by the process that writes a backup here

All tables come from one database snapshot; blobs are copied after it, and are never removed while a row refers to them.
The manifest is renamed into place last, so an interrupted backup leaves the previous one intact. Existing blobs are not
copied again, so the next backup into the same folder costs only what changed.

Not included: the run's key and the trainer's folder; nonces, which `restore` compensates for; and the log's inner
nodes, which follow from its entries. A backup proves that it is complete, not who wrote it: it has a checksum and no
signature. Whoever can write to it can write to the run restored from it.
"""
