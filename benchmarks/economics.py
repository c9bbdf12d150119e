"""Simulated return on cheating under the rules of standing: `python -m benchmarks.economics [--json]`.

The rules are the product's own (`node.protocol.standing`): which slots are measured in full, what is pending, what a
rejection voids, when a node is banned. Only the slots are made up: a cheated row is found with probability `--power`
where it is measured. A strategy's node does one slot after the other; when it is banned it comes back with a new key,
which costs nothing here but the probation and the stake.

Money is in pay for one slot. A slot's credit pays 1 and costs `--cost` to generate honestly; a cheated row costs
`--cheap` of an honest one. The figure is what is earned for each unit spent on computing, over what honesty earns:
above 1 cheating pays. docs/threat-model.md has the table and the formula behind it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from benchmarks.report import make_parser, report
from node.protocol.admission import Outcome
from node.protocol.messages import VerdictEntry
from node.protocol.reasons import Reason
from node.protocol.run import StandingSpec
from node.protocol.standing import Account

ROWS = 16
TOKENS = 1000  # of a slot, whose credit is worth 1
NOBODY = "0" * 64

Plan = Callable[[int, Account], int]
"""How many rows of the next slot are cheated, by the slots that this key has done and its account in the log."""


def _nothing_to_lose(account: Account) -> bool:
    """Whether all that was pending has vested, which a worker reads in the public log."""
    return account.standing.verified >= 16 and not account.unvested


STRATEGIES: dict[str, Plan] = {
    "honest": lambda _done, _account: 0,
    "every row": lambda _done, _account: ROWS,
    "half of the rows": lambda _done, _account: ROWS // 2,
    "one row of each slot": lambda _done, _account: 1,
    "every row of each tenth slot": lambda done, _account: ROWS if done % 10 == 9 else 0,
    "one row, once it is past probation": lambda _done, account: int(account.standing.verified > 8),
    "every row, after 100 right slots": lambda _done, account: ROWS if account.standing.verified >= 100 else 0,
    "one row, after 100 right slots": lambda _done, account: int(account.standing.verified >= 100),
    "every row, while nothing is pending": lambda _done, account: ROWS * _nothing_to_lose(account),
    "one row, while nothing is pending": lambda _done, account: int(_nothing_to_lose(account)),
}


@dataclass(frozen=True, slots=True)
class Prices:
    """Costs and gains of a simulated worker; see the module."""

    power: float
    cost: float
    cheap: float
    stake: float


@dataclass(slots=True)
class Books:
    """Outcome of a strategy."""

    slots: int = 0
    spent: float = 0.0
    vested: float = 0.0
    catches: int = 0
    keys: int = 1
    bad_rows: int = 0
    unseen_rows: int = 0

    def return_on_computing(self, prices: Prices) -> float:
        """Return the pay for each unit of computing, after stakes."""
        return (self.vested - self.catches * prices.stake) / self.spent


def simulate(plan: Plan, rules: StandingSpec, prices: Prices, *, slots: int, seed: int) -> Books:
    """Simulate a worker that follows `plan` for `slots` slots."""
    rng, books = random.Random(seed), Books()
    account, done, cheated = Account(), 0, dict[str, int]()
    for number in range(slots):
        bad = plan(done, account)
        books.slots, done = books.slots + 1, done + 1
        books.bad_rows += bad
        books.spent += prices.cost * (1 - bad / ROWS * (1 - prices.cheap))
        full = rng.random() < account.standing.full_rate(rules)
        # Any of the rows may be the one that is measured.
        found = rng.random() < (1 - (1 - prices.power) ** bad if full else bad / ROWS * prices.power)
        name = f"{number:064x}"
        owed = account.follow(_verdict(name, found=found, full=full), rules=rules)
        books.catches += found
        if not found and not full:
            cheated[name] = bad
        for earlier in sorted(owed):
            late = rng.random() < 1 - (1 - prices.power) ** cheated.pop(earlier, 0)
            account.follow(_verdict(earlier, found=late, full=True, recheck=True), rules=rules)
        books.unseen_rows += 0 if found else bad
        if account.standing.is_banned(rules):
            books.vested += account.vested / TOKENS
            account, done, books.keys = Account(), 0, books.keys + 1
    books.vested += (account.vested + account.pending) / TOKENS
    return books


def _verdict(name: str, *, found: bool, full: bool, recheck: bool = False) -> VerdictEntry:
    return VerdictEntry(
        submission=name,
        node=NOBODY,
        version=0,
        manifest_digest=NOBODY,
        slot=0,
        request=name,
        body=NOBODY,
        outcome=Outcome.REJECTED if found else Outcome.ADMITTED,
        reason=Reason.WRONG_TOKEN if found else None,
        finding=None,
        detail="",
        figures=None,
        totals=None,
        rewards=None,
        tokens=TOKENS,
        decided_at=0,
        spot=None if full or found else 0,
        recheck=recheck,
    )


def table(rules: StandingSpec, prices: Prices, *, slots: int, seed: int) -> Iterator[dict[str, float | str]]:
    """Yield a row for each strategy: its return over honesty's, and which of its bad work nobody saw at once."""
    honest = simulate(STRATEGIES["honest"], rules, prices, slots=slots, seed=seed).return_on_computing(prices)
    for name, plan in STRATEGIES.items():
        books = simulate(plan, rules, prices, slots=slots, seed=seed)
        yield {
            "strategy": name,
            "over_honest": round(books.return_on_computing(prices) / honest, 3),
            "bad_rows_unseen_share": round(books.unseen_rows / max(1, books.bad_rows), 4),
            "bad_rows_for_each_catch": round(books.unseen_rows / max(1, books.catches), 2),
            "keys": books.keys,
        }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--slots", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--floors", type=float, nargs="+", default=[1.0, 0.25, 0.1, 0.02])
    parser.add_argument("--power", type=float, default=1.0, help="probability that a measured, cheated row is found")
    parser.add_argument("--cost", type=float, default=0.8, help="of generating a slot honestly, in its pay")
    parser.add_argument("--cheap", type=float, default=0.25, help="cost of a cheated row over an honest one's")
    parser.add_argument("--stake", type=float, default=0.0, help="lost with each catch, in pay for a slot")
    parser.add_argument("--vesting", type=int, default=StandingSpec().vesting)
    options = parser.parse_args()
    prices = Prices(power=options.power, cost=options.cost, cheap=options.cheap, stake=options.stake)
    found = {}
    for floor in options.floors:
        rules = StandingSpec(full_rate_floor=floor, vesting=options.vesting)
        found[str(floor)] = list(table(rules, prices, slots=options.slots, seed=options.seed))
    dishonest = [row for rows in found.values() for row in rows if row["strategy"] != "honest"]
    figures = {"best_cheat_over_honest": max(float(row["over_honest"]) for row in dishonest)}
    report("economics", options, figures, {"slots": options.slots}, prices=asdict(prices), floors=found)


if __name__ == "__main__":
    main()
