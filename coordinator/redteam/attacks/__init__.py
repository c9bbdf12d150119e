"""Every attack, by name. A new one is a file with one class, and one line here."""

from __future__ import annotations

from coordinator.redteam.attack import Attack
from coordinator.redteam.attacks.abandon import Abandon
from coordinator.redteam.attacks.best_of import BestOf
from coordinator.redteam.attacks.broken_proofs import BrokenProofs
from coordinator.redteam.attacks.clock_skew import ClockSkew
from coordinator.redteam.attacks.colluder import Colluder
from coordinator.redteam.attacks.connection_flood import ConnectionFlood
from coordinator.redteam.attacks.cooler import Cooler
from coordinator.redteam.attacks.copycat import Copycat
from coordinator.redteam.attacks.double_submit import DoubleSubmit
from coordinator.redteam.attacks.early_stop import EarlyStop
from coordinator.redteam.attacks.easy_problems import EasyProblems
from coordinator.redteam.attacks.foreign_lease import ForeignLease
from coordinator.redteam.attacks.foreign_proofs import ForeignProofs
from coordinator.redteam.attacks.forged_logprobs import ForgedLogprobs
from coordinator.redteam.attacks.forged_signature import ForgedSignature
from coordinator.redteam.attacks.greedy import Greedy
from coordinator.redteam.attacks.hidden_prompt import HiddenPrompt
from coordinator.redteam.attacks.hoarding import Hoarding
from coordinator.redteam.attacks.huge_upload import HugeUpload
from coordinator.redteam.attacks.int4 import Int4
from coordinator.redteam.attacks.int8 import Int8
from coordinator.redteam.attacks.late_submit import LateSubmit
from coordinator.redteam.attacks.no_end import NoEnd
from coordinator.redteam.attacks.noise import Noise
from coordinator.redteam.attacks.one_row import OneRow
from coordinator.redteam.attacks.other_model import OtherModel
from coordinator.redteam.attacks.padding import Padding
from coordinator.redteam.attacks.parquet_bombs import ParquetBombs
from coordinator.redteam.attacks.prompt_swap import PromptSwap
from coordinator.redteam.attacks.registrations import Registrations
from coordinator.redteam.attacks.replay import Replay
from coordinator.redteam.attacks.replayed_request import ReplayedRequest
from coordinator.redteam.attacks.runner_up import RunnerUp
from coordinator.redteam.attacks.slow_upload import SlowUpload
from coordinator.redteam.attacks.small_model import SmallModel
from coordinator.redteam.attacks.stale_policy import StalePolicy
from coordinator.redteam.attacks.stranger import Stranger
from coordinator.redteam.attacks.sybils import Sybils
from coordinator.redteam.attacks.top_p import TopP
from coordinator.redteam.attacks.turncoat import Turncoat
from coordinator.redteam.attacks.two_policies import TwoPolicies

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
        Colluder,
        ForgedLogprobs,
        ForeignProofs,
        BrokenProofs,
        Replay,
        Copycat,
        TwoPolicies,
        ParquetBombs,
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
        ConnectionFlood,
    )
}
"""First what is done to a slot, then what is done at the door; each roughly in the order of the threat model."""
