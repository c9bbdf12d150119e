"""What to do about an error, by its `code` or its class, shown below its message as `hint:`.

One table for the errors of every package; a refusal's hint is in its reason's row (node.protocol.reasons,
node.protocol.control).
"""

from __future__ import annotations

from typing import Final

from node.protocol.control import ControlRefusal
from node.protocol.reasons import Refusal, reason_of

DOCTOR: Final = "`swarmproof doctor` looks at this machine and says what to mend."
REPORT: Final = "Run it again with --debug (or SWARMPROOF_DEBUG=1) for the traceback, and report that."
_ADDRESS: Final = "Compare the address and the run's id with what the run's operator gave you."
_REACH: Final = "See whether the address is right and the network is up (`swarmproof doctor --coordinator URL`)."
_UPDATE: Final = "Update swarmproof here; if it stays, tell whoever runs the other side."
_OTHER_SOURCE: Final = "Try again, or name another source: nothing of what was sent was used."
_ASK: Final = "Ask the run's operator; `swarmproof audit` checks what the run says of itself."
_PRINTED: Final = "Copy --run-id, --key and the address from what one `swarmproof publish` printed."
_CHECK: Final = "`swarmproof env check NAME` tries it, and says what its author has to change."
_AUTHOR: Final = "Its author has to change that; docs/environments.md says what an environment may do."
_LOGS: Final = "The log above says what came before; `swarmproof -v …` says more."

HINTS: Final[dict[str, str]] = {
    # node.errors
    "node_error": _LOGS,
    "identity_error": "`swarmproof keys new FILE` makes a key, `swarmproof keys restore` brings one back.",
    "key_path": "See that its folder can be read and written and that its disk has room, or name another file.",
    "key_exposed": "A key that others could read may have been copied: if you share this machine, make a new one.",
    "config_error": "`swarmproof COMMAND --help` shows every setting, and what its values look like.",
    "config_malformed": "Write a table per command, such as [worker], and below it lines like: slots = 8",
    "no_libp2p": "Without peers everything works as well: join with --coordinator and --run-id.",
    "engine_not_installed": DOCTOR,
    "overwritten": "Give each of the two a venv of its own.",
    "device_missing": f"{DOCTOR} --device auto takes what there is.",
    "state_error": "One process uses one state folder: give each its own with --state.",
    "spec_changed": "`swarmproof audit URL --run-id ID` says what the run's log has to say about it.",
    "damaged_state": "Keep what you moved away: its receipts prove what the run owes this node.",
    "in_use": "End the other process first, or give this one another folder with --state.",
    "engine_failed": DOCTOR,
    "out_of_memory": "Give --policy-memory less, end what else uses that memory, or take a larger machine.",
    "does_not_fit": "Take a smaller --max-num-seqs or --max-model-len, free memory, or use a larger machine.",
    "wrong_engine": "Start this process again with --engine torch.",
    "policy_unusable": f"{DOCTOR} With --policy FILE it looks at whether the policy fits.",
    "network_down": "See whether this machine reaches the internet, and ask the operator for a newer --join string; "
    "--coordinator and --run-id work without peers.",
    "coordinator_fault": _ADDRESS,
    "log_too_large": _ASK,
    "unavailable": _REACH,
    "timeout": _REACH,
    "refused": f"{_ADDRESS} `swarmproof status` says where this node stands.",
    # node's parts
    "environment_fault": f"{_UPDATE} The run says which environments it needs.",
    "unknown_environment": "`swarmproof env install PACKAGE --run run.toml` names one of a package.",
    "claimed_twice": "Leave `package` out of run.toml, or rename the environment.",
    "not_installed": "Read the package first; `swarmproof env install` installs it, `swarmproof env list` shows all, "
    "and what each offers.",
    "several_environments": "Name one as NAME==VERSION, or by the beginning of its lock's digest.",
    "bad_name": "Such as `swarmproof env new largest-number`.",
    "bad_lock": "Take the lock that the run's operator has; `swarmproof env install` writes one.",
    "other_lock": "Have the wheels that the run's operator has, with --find-links, or ask for a lock that fits.",
    "environment_changed": "`swarmproof env remove` it and install it again.",
    "install_failed": "What pip says above is what to mend; --find-links names a folder of wheels.",
    "package_missing": "Add it to what the environment's package requires, and install that again.",
    "package_version": "Install the named version where swarmproof is installed, then start again.",
    "environment_missing": "`swarmproof env list` says which environments a package offers.",
    "bad_arguments": "docs/environments.md has what each environment takes; correct its arguments in run.toml.",
    "refused_dataset": "docs/environments.md lists the datasets that are offered, and those of its package.",
    "refused_environment": "docs/environments.md says what can be repeated on every machine; its author may mend it.",
    "environment_failed": _CHECK,
    "environment_slow": _CHECK,
    "environment_died": _CHECK,
    "environment_garbled": _CHECK,
    "env:environment_failed": _AUTHOR,
    "env:environment_slow": _AUTHOR,
    "env:environment_died": _AUTHOR,
    "env:environment_garbled": _AUTHOR,
    "needs_bound": "Give it a table [environments.problems] with a count in run.toml.",
    "needs_network": "Have its data in its package, or take another environment: it gets no network.",
    "python_version": "Install swarmproof under the Python that the run names, and start that one.",
    "sandbox_broken": "`swarmproof doctor` says what keeps programs from being run in isolation here.",
    "sandbox_missing": "Install bubblewrap (on Debian: apt install bubblewrap), then start again.",
    "bad_chat": "Take a named format in sampling.chat, such as chatml; docs/chat.md says what a template may do.",
    "bad_answer": "Mend the answer, or take another grader; docs/graders.md says which answers each one takes.",
    "grader_fault": "Run it with the Python that the graders of the run name (docs/graders.md).",
    "dataset_fault": f"{_LOGS} `swarmproof dataset show FILE` verifies a dataset's file.",
    "dataset_missing": "`swarmproof dataset add` puts it into the run's data folder; --datasets names another one.",
    "answers_missing": "Copy the file of answers that `swarmproof dataset add` made into the run's datasets/ folder.",
    "answers_differ": "Take both files of the dataset from one `swarmproof dataset add`, and no other.",
    "dataset_changed": "Make it again with `swarmproof dataset add`, from the same files and with the same options.",
    "worker:dataset_changed": "See what writes there, and whether the disk is sound; --state names another folder.",
    "verifier:dataset_changed": "See what writes there, and whether the disk is sound. `swarmproof dataset add` makes "
    "it again, from the same files and with the same options.",
    "dataset_malformed": "Make it with `swarmproof dataset add`; of a run that was joined, the operator has to.",
    "no_held_out_rows": "Make the dataset with --held-out, and begin a run with that.",
    "wrong_content": f"{_OTHER_SOURCE} If every source has this one: {_ASK}",
    "verifier_failed": "Nobody is blamed for it; start again, and look at memory and disk if it stays.",
    "policy_away": "Start again when the origin or a relay serves that policy; --source names another one.",
    "policy_error": DOCTOR,
    "malformed_policy": "Have the operator publish a policy that this version can build, or update swarmproof.",
    "unreadable": "See that the file is there and readable, and that memory and disk are free.",
    "engine_error": DOCTOR,
    "no_policy": "Start again: the engine was asked for tokens before it had a policy.",
    "broken_policy": "Nothing on this machine is at fault: the operator has to publish another policy.",
    "interrupted": "Start again: what was drawn so far is not used.",
    # shardcast.errors
    "shardcast_error": _LOGS,
    "peer_fault": _OTHER_SOURCE,
    "bad_signature": f"{_OTHER_SOURCE} {_ADDRESS}",
    "wrong_run": _ADDRESS,
    "wrong_signer": _ADDRESS,
    "stale": "Try again, or another source: this one is behind. Compare clocks.",
    "rollback": "Try again, or another source: this one is behind.",
    "equivocation": f"Keep the state folder: it has the proof that two policies were signed as one. {_ASK}",
    "network_fault": "Try again when the network is up, or name another source.",
    "unreachable": "See whether the other side runs, and whether its address can be reached from here.",
    "bad_url": "Give it as http://HOST:PORT; a trainer, relay or publisher prints its address when it starts.",
    "not_served": "Ask a source that has it: the origin (a trainer or a publisher, port 8710) keeps every version, "
    "relays the last ones, and a coordinator none.",
    "no_head": "Try again when something is published.",
    "too_slow": "Try again, or name a source that is nearer.",
    "local_fault": "See that disk, folder and rights are in order, then start again: it goes on where it stopped.",
    "disk_full": "Free some disk, or name a folder on another one with --state.",
    "read_only": "Mount the disk writable, or name a folder on another one; it goes on where it stopped.",
    "no_access": "Give this user the file and its folder (chown, chmod), or name another one.",
    "cannot_bind": "End what listens there, or take another port; 0 takes a free one.",
    # `swarmproof publish`
    "publish:disk_full": "Free some disk; --keep says how many versions stay.",
    "publish:in_use": "End it first, or start it with --watch, which publishes the file again whenever it is replaced.",
    "version_conflict": "Leave --version out to take the next number.",
    "version_not_rising": "Leave --version out to take the next number.",
    # `swarmproof fetch`
    "fetch:disk_full": "Free some disk; the same command goes on where it stopped.",
    "fetch:no_head": "Try again when something is published, or wait for it with --follow.",
    "fetch:unreachable": "See whether `swarmproof publish` runs there, and whether it can be reached from here.",
    "fetch:wrong_run": _PRINTED,
    "fetch:wrong_signer": _PRINTED,
    # toploc.errors
    "bad_proof": _OTHER_SOURCE,
    "bad_activations": DOCTOR,
    # coordinator.errors
    "coordinator_error": _LOGS,
    "bad_configuration": "`swarmproof COMMAND --help` has every setting, and an example.",
    "uncalibrated": "`swarmproof calibrate --run run.toml` writes run.calibrated.toml: start with that. To try things "
    "out, --uncalibrated takes the file as it is.",
    "unfit_model": "`swarmproof coordinator --check --run run.toml --key run.key --data RUN` looks again, "
    "and starts nothing.",
    "sft:unfit_model": "docs/models.md says which folders can become a policy; the message names the file to mend.",
    "bad_data": "Mend or remove the named lines; docs/sft.md says what a line may hold.",
    "bad_loss": "Install the named package where the trainer runs, or mend it; docs/training.md says what a loss is.",
    "storage_fault": "`swarmproof check --data RUN` names what is damaged; --repair writes what follows from the log. "
    "Put the rest back from a backup, which has each blob under its name in blobs/.",
    "damaged_blob": "Put the named blob back: BACKUP/blobs has it under the same name, in the same subfolder.",
    "corrupt_read": "See what lies between this machine and the object store; what it sends is damaged on the way.",
    "state_differs": "`swarmproof check --data RUN` names every difference; --repair writes what follows from the log.",
    "other_release": "Install the release that the run's coordinator has: an older one can use neither the database of "
    "a newer one nor its rules.",
    "older_database": "After a backup with the earlier release, start the coordinator of this one, which migrates the "
    "database; see 'Go to another release' in docs/operating.md.",
    "backup:older_database": "Make the backup with the release that the run has; see 'Go to another release' in "
    "docs/operating.md.",
    "history_lost": "Bring the newest database back; `swarmproof check --data RUN` compares it. To go on from an older "
    "one all the same, see 'A database that is older than its log' in docs/operating.md (`check --accept-rollback`).",
    "store_away": "See that the object store runs and can be reached from here, then start again.",
    "other_rules": "Give whoever records the run.toml that you calibrate, and the same --policy; then record again.",
    "other_verifier": "Give --verifier here and there alike, as the run's verifiers have it.",
    "calibrate:peer_fault": "Nothing of the file was used; ask for another one, or leave it out.",
    "calibrate:bad_signature": "Nothing of the file was used; ask for another one, or leave it out.",
    "bad_backup": "Take another backup, and leave this one as it is; nothing here was changed.",
    "bad_checkpoint": "Move the named checkpoint away: the trainer goes on from the one before it, and trains the "
    "logged batches since then again.",
    "damaged_checkpoint": "Start the trainer again: it goes on from the checkpoint before that.",
    "replay_differs": "Start it where and how the run was trained before, or restore --state and the run from backups.",
    "trainer:in_use": "End the other trainer first: a run has one, and --state is its own.",
    "trainer:disk_full": "Free some disk, then start it again; --state may move to another, with all that is in it.",
    "trainer:read_only": "Mount the disk writable, then start it again: it goes on where it stopped.",
    "trainer:no_access": "Give this user --state and all that is in it (chown, chmod), then start it again.",
    "trainer:damaged": "Restore --state from a backup that fits the run's database; nothing was published.",
    "trainer:version_conflict": "Restore --state from a backup that fits the run's database; nothing was published.",
    "trainer:version_not_rising": "Restore --state from a backup that fits the run's database; nothing was published.",
    "export_error": "`swarmproof export --help` has every option, and an example.",
    "import_fault": "`swarmproof import rwkv --help` has every option, and an example.",
    "unreadable_checkpoint": "Download it again, and compare its checksum; a file of another make is not read.",
    "unsupported_weights": "Take one of the published models that docs/models.md names.",
    "bad_vocabulary": "Take rwkv_vocab_v20230424.txt as the package rwkv has it, or leave --vocabulary out.",
    "folder_not_empty": "Name another folder with --to, or one that is not there yet; nothing was written.",
    "adapter_not_held": "Name the --state folder of a [training.lora] trainer or of sft --lora, and a version it has.",
    "version_not_held": "Name another version or --state folder: a trainer keeps every version, others the last few.",
    "damaged": "Take the version from another process's folder with --state, or fetch it again.",
    "sft:in_use": "End the other process first, or give this one another folder with --state.",
    "sft:bad_checkpoint": "Name another --state, or go on with the release that wrote this one.",
    "sft:damaged_checkpoint": "Start the same command again: it goes on from the checkpoint before that.",
    "sft:stopped": "Give the same command again: it goes on from there.",
    "stopped": "Start it again: it goes on from the last finished step.",
    "demo_error": "The log folder that is named above says more; `swarmproof demo` starts anew.",
    "coordinator:too_slow": f"Leave the machine to the demonstration, and start it anew. {DOCTOR}",
    "keeps_dying": f"Read the end of that process's log. {DOCTOR}",
}
"""Hints by code; a missing code falls back to its class's code, then to its bases'.

`COMMAND:` or `PACKAGE:` before a code restricts the hint to that command, or to that package's errors.
"""


def hint_for(error: BaseException, command: str | None = None) -> str:
    """Return what to do about `error`, by its reason, else by its code or class.

    `command` is what it ended, such as "worker" or "dataset add".
    """
    if isinstance(error, Refusal):
        return error.reason.todo
    if isinstance(error, ControlRefusal):
        return error.reason.advice
    code = getattr(error, "code", None)
    # The same word may be a code of the broadcast: only a coordinator's reply has `server_time`.
    reason = reason_of(code) if isinstance(code, str) and hasattr(error, "server_time") else None
    if reason is not None:
        return reason.todo
    codes = [code, *(vars(cls).get("code") for cls in type(error).__mro__)]
    first = (command or "").partition(" ")[0]
    package = type(error).__module__.partition(".")[0]
    keys = [key for each in codes for key in (f"{first}:{each}", f"{package}:{each}", each)]
    hint = next((HINTS[key] for key in keys if key in HINTS), _unforeseen(error))
    return hint.replace("COMMAND", command or "COMMAND")


def _unforeseen(error: BaseException) -> str:
    if isinstance(error, OSError):
        return "See that the file, its folder and its rights, and the disk are as the command needs them."
    return REPORT
