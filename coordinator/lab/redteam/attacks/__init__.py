"""Every attack, by name. A new one is a file with one class, and one line here."""

from __future__ import annotations

from coordinator.lab.redteam.attack import Attack
from coordinator.lab.redteam.attacks.abandon import Abandon
from coordinator.lab.redteam.attacks.best_of import BestOf
from coordinator.lab.redteam.attacks.broken_proofs import BrokenProofs
from coordinator.lab.redteam.attacks.clock_skew import ClockSkew
from coordinator.lab.redteam.attacks.colluder import Colluder
from coordinator.lab.redteam.attacks.connection_flood import ConnectionFlood
from coordinator.lab.redteam.attacks.cooler import Cooler
from coordinator.lab.redteam.attacks.copycat import Copycat
from coordinator.lab.redteam.attacks.double_submit import DoubleSubmit
from coordinator.lab.redteam.attacks.early_stop import EarlyStop
from coordinator.lab.redteam.attacks.easy_problems import EasyProblems
from coordinator.lab.redteam.attacks.foreign_lease import ForeignLease
from coordinator.lab.redteam.attacks.foreign_proofs import ForeignProofs
from coordinator.lab.redteam.attacks.forged_logprobs import ForgedLogprobs
from coordinator.lab.redteam.attacks.forged_signature import ForgedSignature
from coordinator.lab.redteam.attacks.greedy import Greedy
from coordinator.lab.redteam.attacks.hanging_relays import HangingRelays
from coordinator.lab.redteam.attacks.hidden_prompt import HiddenPrompt
from coordinator.lab.redteam.attacks.hoarding import Hoarding
from coordinator.lab.redteam.attacks.huge_upload import HugeUpload
from coordinator.lab.redteam.attacks.int4 import Int4
from coordinator.lab.redteam.attacks.int8 import Int8
from coordinator.lab.redteam.attacks.late_submit import LateSubmit
from coordinator.lab.redteam.attacks.no_end import NoEnd
from coordinator.lab.redteam.attacks.noise import Noise
from coordinator.lab.redteam.attacks.one_row import OneRow
from coordinator.lab.redteam.attacks.other_model import OtherModel
from coordinator.lab.redteam.attacks.padding import Padding
from coordinator.lab.redteam.attacks.prompt_swap import PromptSwap
from coordinator.lab.redteam.attacks.registrations import Registrations
from coordinator.lab.redteam.attacks.replay import ReplayedSubmission
from coordinator.lab.redteam.attacks.replayed_request import ReplayedRequest
from coordinator.lab.redteam.attacks.returner import Returner
from coordinator.lab.redteam.attacks.runner_up import RunnerUp
from coordinator.lab.redteam.attacks.slow_upload import SlowUpload
from coordinator.lab.redteam.attacks.small_model import SmallModel
from coordinator.lab.redteam.attacks.squatter import Squatter
from coordinator.lab.redteam.attacks.stale_policy import StalePolicy
from coordinator.lab.redteam.attacks.stranger import Stranger
from coordinator.lab.redteam.attacks.submission_bombs import SubmissionBombs
from coordinator.lab.redteam.attacks.sybils import Sybils
from coordinator.lab.redteam.attacks.top_p import TopP
from coordinator.lab.redteam.attacks.turncoat import Turncoat
from coordinator.lab.redteam.attacks.two_policies import TwoPolicies
from coordinator.lab.redteam.attacks.withheld_good import WithheldGood
from coordinator.lab.redteam.attacks.withheld_kind import WithheldKind
from coordinator.lab.redteam.attacks.withheld_signal import WithheldSignal

ATTACKS: dict[str, type[Attack]] = {
    attack.name: attack
    for attack in (
        OtherModel,
        Int4,
        Int8,
        Noise,
        StalePolicy,
        SmallModel,
        BestOf,
        Greedy,
        Cooler,
        TopP,
        RunnerUp,
        NoEnd,
        EarlyStop,
        Padding,
        HiddenPrompt,
        PromptSwap,
        EasyProblems,
        Abandon,
        WithheldKind,
        WithheldSignal,
        WithheldGood,
        Squatter,
        Returner,
        Colluder,
        ForgedLogprobs,
        ForeignProofs,
        BrokenProofs,
        ReplayedSubmission,
        Copycat,
        TwoPolicies,
        SubmissionBombs,
        Sybils,
        OneRow,
        Turncoat,
        ForgedSignature,
        ReplayedRequest,
        ClockSkew,
        Stranger,
        ForeignLease,
        DoubleSubmit,
        LateSubmit,
        HugeUpload,
        SlowUpload,
        Registrations,
        Hoarding,
        HangingRelays,
        ConnectionFlood,
    )
}
"""First what is done to a slot, then what is done at the door; each roughly in the order of the threat model."""
