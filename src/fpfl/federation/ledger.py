r"""A node's own ledger: what it was asked to agree to, and what it has answered.

A chain like a run's ledger (`fpfl.store.chain`), beside the node's identity. Its records:

    proposal   an agreement that is not approved here, with its terms
    approval   one that is, and by whom: T sums more of it may be opened
    end        one that is over: nothing more is answered
    vector     before a vector of this node leaves: session, agreement, round
    answer     before anything else leaves that is said once in a session
    sum        before shares leave that open a session's sum: the session is charged
    overrun    an answer took longer than `hold`
    budget     what all agreements together may cost, and the filter's order

A line is on the disk before what it is about leaves the node. So a node that is killed in between
has counted too much at worst, never too little; and a line that was torn stands for nothing that
left.

**ε by the node's own accounting.** One opened sum of an agreement costs what the agreement's
mechanism costs, whatever its server says. An agreement is approved as a whole: with T sums of each
one that was approved before, all of its T must fit into the site's budget,

    Σ_agreements T · ρ_agreement(α) ≤ ρ(ε, δ, α),

with its measurement's ρ₀(α) besides, where it has one: that is round 0, which is counted by itself,
and no second one is answered.

by the privacy filter that was fixed before the first (`fpfl.privacy.filter`). What was approved is
reserved, so a server that keeps to the agreement never meets the limit on the way. Of an agreement
that was ended the vectors count that it was given.

**What is a sum.** A session opens one at most. It counts here when this node gives shares for it.
A sum takes the shares of t nodes, not of all, so one may be opened with this node's vector and
without its shares. With N nodes, of whom c collude, each sum is counted by t − c honest nodes at
least, and each of them counts T: a server that lies opens

    T (N − c)/(t − c)

sums at most. Where that is too many, a site counts every vector that it gives, with
`count = "vectors"`: then no server and no other node has a say, and an attempt that is abandoned
costs a round.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from fpfl.federation.approval import Kind, kinds_of, most_sums
from fpfl.store.chain import Chain, ChainError
from fpfl.store.files import sync_folder

if TYPE_CHECKING:
    from fpfl.privacy.filter import Mechanism, PrivacyFilter

_HOLDS = "node ledger"

Count = Literal["sums", "vectors"]
What = Literal["reserved", "sums", "vectors"]


class NotAnsweredError(Exception):
    """The site refuses. ``str`` is for the server; ``here`` is more, for the node's own log."""

    def __init__(self, why: str, here: str = "") -> None:
        super().__init__(why)
        self.here = here


@dataclass
class Account:
    """What the ledger knows of one agreement.

    Parameters
    ----------
    terms
        Its terms (`fpfl.federation.approval.terms_of`).
    approvals
        Who approved it, in order.
    ended
        Whether it is over.
    vectors
        The rounds of the sessions in which this node gave a vector, by session.
    sums
        Those in which it gave shares.
    overruns
        How many answers took longer than `hold`.
    """

    terms: dict[str, Any]
    approvals: list[str] = field(default_factory=list)
    ended: bool = False
    vectors: dict[str, int] = field(default_factory=dict)
    sums: set[str] = field(default_factory=set)
    overruns: int = 0

    @property
    def approved(self) -> bool:
        """Whether it may be answered."""
        return bool(self.approvals) and not self.ended

    @property
    def limit(self) -> int:
        """How many sums may be opened."""
        return len(self.approvals) * most_sums(self.terms)

    @property
    def reserved(self) -> int:
        """How many sums the budget is charged with."""
        return sum(self.counted("reserved", kind) for kind in kinds_of(self.terms))

    def counted(self, what: What, kind: Kind) -> int:
        """How many sums of a kind there are, counted so."""
        limit = len(self.approvals) * kind.sums
        if what == "reserved" and not self.ended:
            return limit
        sessions = self.sums if what == "sums" else self.vectors.keys()
        found = sum(self.vectors[session] in kind.rounds for session in sessions)
        return min(found, limit) if what == "reserved" else found

    def left(self, count: Count, round: int | None) -> bool:
        """Whether there is one left of a round's kind; of any, where it is not said which."""
        return any(
            self.counted(count, kind) < len(self.approvals) * kind.sums
            for kind in kinds_of(self.terms)
            if round is None or round in kind.rounds
        )


@dataclass(frozen=True)
class Budget:
    """What all agreements together may cost this site's users.

    Parameters
    ----------
    epsilon, delta
        ε at δ.
    order
        The filter's Rényi order; by default the best one for the first agreement.
    """

    epsilon: float
    delta: float
    order: int | None = None


class NodeLedger:
    """The open ledger of a node; `open` makes it where there is none yet.

    Attributes
    ----------
    node : str
        The node's name.
    accounts : dict of str to Account
        By the agreement's fingerprint, in hexadecimal digits.
    """

    def __init__(self, chain: Chain) -> None:
        first = chain.records[0]
        if first.get("holds") != _HOLDS:
            raise ChainError(
                f"{chain.path} is not a node's ledger (it holds {first.get('holds')!r}): put the "
                "node's own in its place"
            )
        self.node = str(first["node"])
        self.accounts: dict[str, Account] = {}
        self.filter_terms: dict[str, Any] | None = None
        self._sessions: dict[str, str] = {}
        self._answers: dict[tuple[str, str], str] = {}
        self._chain = chain
        del chain.records[0]
        self._take()

    @classmethod
    def open(cls, path: str | os.PathLike[str], node: str, write: bool = True) -> Self:
        """Read and verify the file, or begin it; with ``write=False`` only look.

        Two processes that begin it at once have one file.
        """
        target = Path(path)
        if write and not target.exists():
            _begin(target, node)
        chain = Chain.open(target, write)
        try:
            found = cls(chain)
            if found.node != node:
                raise ChainError(
                    f"{target} is the ledger of {found.node!r}, and this node is {node!r}: put "
                    "the node's own in its place"
                )
        except BaseException:
            chain.close()
            raise
        return found

    # --- what is written down -----------------------------------------------------------------

    def propose(self, fingerprint: str, terms: dict[str, Any]) -> None:
        """Keep the terms of an agreement that is not approved, for whoever is to approve it."""
        with self._writing():
            if fingerprint not in self.accounts:
                self._append("proposal", agreement=fingerprint, terms=terms)

    def approve(
        self,
        fingerprint: str,
        by: str,
        *,
        terms: dict[str, Any] | None = None,
        budget: Budget | None = None,
        rounds: int | None = None,
        again: bool = False,
        only: Callable[[NodeLedger], bool] = lambda ledger: True,
    ) -> bool:
        """Approve an agreement, or refuse one that the site has no room for.

        Parameters
        ----------
        fingerprint
            Which one.
        by
            Who approves it: in words, for the file.
        terms
            Its terms; by default those that were proposed.
        budget
            The site's budget, if it has one.
        rounds
            The most sums that may be opened of all agreements together.
        again
            Approve T sums more of one that is approved.
        only
            Whether to do it, asked while nobody else can write.

        Returns
        -------
        bool
            Whether it is approved now.
        """
        with self._writing():
            account = self.accounts.get(fingerprint)
            if account is not None and account.approved and not again:
                return True
            if account is not None and account.ended:
                raise NotAnsweredError(
                    f"the agreement {fingerprint} was ended at this site, and is not taken up again"
                )
            if not only(self):
                return False
            if account is not None:
                terms = account.terms
            if terms is None:
                known = ", ".join(self.accounts) or "none"
                raise NotAnsweredError(
                    f"no agreement {fingerprint} has been proposed to this node (known: {known}): "
                    "it is when a server first asks under it. Approve it then, or list its "
                    "fingerprint in site.toml"
                )
            self._check_rounds(terms, rounds)
            fixed = self._check_budget(terms, budget)
            if fixed is not None and self.filter_terms is None:
                self._append("budget", **fixed)
            if account is None:
                self._append("proposal", agreement=fingerprint, terms=terms)
            self._append("approval", agreement=fingerprint, by=by)
        return True

    def end(self, fingerprint: str) -> None:
        """Answer nothing more under an agreement; what it has not used is free again.

        Every vector that it was given counts from then on: a sum of it may still be opened.
        """
        with self._writing():
            if fingerprint not in self.accounts:
                raise NotAnsweredError(f"there is no agreement {fingerprint} in this ledger")
            if not self.accounts[fingerprint].ended:
                self._append("end", agreement=fingerprint)

    def check(self, fingerprint: str, round: int | None, count: Count = "sums") -> None:
        """Raise where a round of an agreement, or any, is not to be answered."""
        self._refresh()
        self._check(fingerprint, round, count)

    def give_vector(
        self, session: bytes, fingerprint: str, round: int, count: Count = "sums"
    ) -> None:
        """Write down that a vector is about to leave, or refuse."""
        with self._writing():
            self._check(fingerprint, round, count)
            if session.hex() in self._sessions:
                raise NotAnsweredError("a vector was masked in this session before.")
            self._append("vector", session=session.hex(), agreement=fingerprint, round=round)

    def give(self, step: str, session: bytes, request: bytes, count: Count = "sums") -> None:
        """Write down what is about to be said once in a session, or refuse.

        ``request`` is a hash of the request. The same one may come again: its answer says nothing
        new. With the step ``"unmask"`` the session's sum is charged.
        """
        with self._writing():
            name = session.hex()
            fingerprint = self._sessions.get(name)
            if fingerprint is None:
                raise NotAnsweredError(f"no vector was given in this session, and {step!r} came.")
            account = self.accounts[fingerprint]
            if not account.approved:
                raise NotAnsweredError(f"the agreement {fingerprint} was ended at this site.")
            known = self._answers.get((name, step))
            if known == request.hex():
                return
            if known is not None:
                raise NotAnsweredError(
                    f"{step!r} was answered in this session before, for another request."
                )
            if step != "unmask":
                self._append("answer", session=name, step=step, request=request.hex())
                return
            if count == "sums":  # else it was counted as a vector
                self._check_left(fingerprint, account, account.vectors[name], count)
            self._append("sum", session=name, agreement=fingerprint, request=request.hex())

    def overran(self, fingerprint: str, round: int, seconds: float) -> None:
        """Write down that an answer took longer than `hold`. It never leaves the node."""
        with self._writing():
            if fingerprint in self.accounts:
                self._append(
                    "overrun", agreement=fingerprint, round=round, seconds=round_up(seconds)
                )

    # --- what it comes to ---------------------------------------------------------------------

    def charges(self, what: What) -> dict[Mechanism | None, int]:
        """How often each mechanism was charged; None stands for what nothing bounds."""
        self._refresh()
        return self._charges(what)

    def spent(self, delta: float, what: What = "sums") -> float:
        """ε at δ of what was charged, at the best Rényi order; infinite where nothing bounds it."""
        from fpfl.privacy.renyi import ORDERS, renyi_epsilon

        charges = {m: times for m, times in self.charges(what).items() if times}
        if None in charges:
            return float("inf")
        return min(
            renyi_epsilon(sum(t * m.renyi(order) for m, t in charges.items() if m), order, delta)
            for order in ORDERS
        )

    def as_dict(self) -> dict[str, Any]:
        """The figures, for people and programs; an ε is None where nothing bounds it.

        At the budget's δ; without one at the least of the agreements'.
        """
        self._refresh()
        fixed = self.filter_terms
        deltas = [fixed] if fixed else [account.terms for account in self.accounts.values()]
        delta = min((each["delta"] for each in deltas if each["delta"]), default=1e-6)

        def spent(what: What) -> float | None:
            epsilon = self.spent(delta, what)
            return None if math.isinf(epsilon) else epsilon

        found: dict[str, Any] = {
            "node": self.node,
            "head": list(self._chain.head),
            "budget": fixed,
            "delta": delta,
            "reserved": spent("reserved"),
            "spent": spent("sums"),
            "at most": spent("vectors"),
            "agreements": {
                name: {
                    "rounds": account.terms["rounds"],
                    "epsilon": account.terms["epsilon"],
                    "approvals": account.approvals,
                    "ended": account.ended,
                    "limit": account.limit,
                    "vectors": len(account.vectors),
                    "sums": len(account.sums),
                    "overruns": account.overruns,
                }
                for name, account in self.accounts.items()
            },
        }
        return found

    @property
    def head(self) -> tuple[int, str]:
        """(n, hash) of the last record: kept elsewhere, it shows a cut or changed tail later."""
        return self._chain.head

    def close(self) -> None:
        """Close the file."""
        self._chain.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- checks -------------------------------------------------------------------------------

    def _check(self, fingerprint: str, round: int | None, count: Count) -> None:
        account = self.accounts.get(fingerprint)
        if account is None or not account.approved:
            raise NotAnsweredError(
                f"the agreement {fingerprint} is not approved at this site: fpfl federation "
                f"approve SITE {fingerprint} shows and approves it."
            )
        known = [kind.rounds for kind in kinds_of(account.terms)]
        if round is not None and (
            type(round) is not int or not any(round in rounds for rounds in known)
        ):
            raise NotAnsweredError(
                f"round {round} of the agreement {fingerprint} was asked for, and it has rounds "
                f"{min(rounds[0] for rounds in known)} to {max(rounds[-1] for rounds in known)}."
            )
        self._check_left(fingerprint, account, round, count)

    def _check_left(
        self, fingerprint: str, account: Account, round: int | None, count: Count
    ) -> None:
        if not account.left(count, round):
            kind = "measurements" if round == 0 else "sums"
            most = sum(
                kind.sums
                for kind in kinds_of(account.terms)
                if round is None or round in kind.rounds
            )
            raise NotAnsweredError(
                f"all {len(account.approvals) * most} {kind} of the agreement {fingerprint} have "
                "been opened. To "
                "have it run once more, its site has to approve it again: fpfl federation approve "
                f"SITE {fingerprint} --again."
            )

    def _check_rounds(self, terms: dict[str, Any], rounds: int | None) -> None:
        taken = sum(account.reserved for account in self.accounts.values())
        if rounds is not None and taken + most_sums(terms) > rounds:
            raise NotAnsweredError(
                "this site's cap on rounds has no room for the agreement.",
                f"of {rounds} sums that site.toml allows, {taken} are taken, and the agreement "
                f"has {most_sums(terms)}: raise rounds, or end an agreement",
            )

    def _check_budget(self, terms: dict[str, Any], budget: Budget | None) -> dict[str, Any] | None:
        """The budget's record; raises where an agreement does not fit into it."""
        fixed = self.filter_terms
        if fixed is not None and (
            budget is None
            or (budget.epsilon, budget.delta) != (fixed["epsilon"], fixed["delta"])
            or budget.order not in (None, fixed["order"])
        ):
            raise NotAnsweredError(
                "this site's budget is not in order.",
                f"site.toml has another budget than the ledger, where ε = {fixed['epsilon']:g} at "
                f"δ = {fixed['delta']:g} was fixed before anything was released. Set it back. "
                "(A further budget is a further ledger: the two ε and the two δ add up)",
            )
        if budget is None:
            return None
        if fixed is None and any(account.approvals for account in self.accounts.values()):
            raise NotAnsweredError(
                "this site's budget is not in order.",
                "site.toml has a budget, and agreements were approved before it had one. A budget "
                "holds where it is fixed before the first: begin a ledger with it (what was "
                "approved so far comes on top), or leave it out",
            )
        kinds = [(kind.mechanism, kind.sums) for kind in kinds_of(terms)]
        mechanism = kinds[0][0]
        if mechanism is None:
            raise NotAnsweredError(
                "this site has a privacy budget, and nothing bounds what this agreement's sums "
                "say: it counts as infinite."
            )
        try:
            limit, fixed = self._limit(budget, mechanism)
            wanted = sum(limit.cost(each) * sums for each, sums in kinds if each is not None)
            taken = sum(
                limit.cost(charged) * times
                for charged, times in self._charges("reserved").items()
                if charged is not None
            )
        except ImportError as error:
            raise NotAnsweredError(
                "this site has a privacy budget, and cannot count: see its own log.",
                f"{error}. Without it nothing is answered",
            ) from error
        if taken + wanted > limit.units:
            raise NotAnsweredError(
                "this site's privacy budget has no room for the agreement.",
                f"the budget is ε = {limit.epsilon:g} at δ = {limit.delta:g}; "
                f"{taken / limit.units:.2%} of it is taken, and the agreement takes "
                f"{wanted / limit.units:.2%}: end an agreement that is over, or agree on less",
            )
        return fixed

    def _limit(self, budget: Budget, mechanism: Mechanism) -> tuple[PrivacyFilter, dict[str, Any]]:
        from fpfl.privacy.filter import PrivacyFilter, good_order

        fixed = self.filter_terms
        if fixed is None:
            order = budget.order or good_order(budget.epsilon, budget.delta, mechanism)
            fixed = {
                "epsilon": budget.epsilon,
                "delta": budget.delta,
                "order": order,
                "neighbours": mechanism.neighbours,
            }
        if mechanism.neighbours != fixed["neighbours"]:
            raise NotAnsweredError(
                "this site's privacy budget is about other neighbours than the agreement.",
                f"the budget is about {fixed['neighbours']!r} neighbours and the agreement about "
                f"{mechanism.neighbours!r}: what they say cannot be added up",
            )
        return PrivacyFilter(fixed["epsilon"], fixed["delta"], fixed["order"]), fixed

    def _charges(self, what: What) -> dict[Mechanism | None, int]:
        found: dict[Mechanism | None, int] = {}
        for account in self.accounts.values():
            for kind in kinds_of(account.terms):
                mechanism = kind.mechanism
                found[mechanism] = found.get(mechanism, 0) + account.counted(what, kind)
        return found

    # --- the file -----------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the file, know all that is in it, and have it on the disk at the end."""
        with self._chain.shared():
            self._take()
            yield
            self._chain.sync()

    def _append(self, kind: str, **fields: Any) -> None:
        self._chain.append(kind, **fields)
        self._take()

    def _refresh(self) -> None:
        if self._chain.changed():
            with self._chain.shared():
                self._take()

    def _take(self) -> None:
        for record in self._chain.records:
            try:
                self._take_one(record)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ChainError(
                    f"{self._chain.path}, line {record['n'] + 1}: it is not what a node's ledger "
                    f"holds ({error!r}). Restore the file from a backup, or upgrade fpfl."
                ) from error
        self._chain.records.clear()

    def _take_one(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if kind == "proposal":
            terms = record["terms"]
            if (
                not {"rounds", "attempts", "epsilon", "mechanism"} <= terms.keys()
                or terms["rounds"] < 1
            ):
                raise ValueError("terms of no agreement")
            self.accounts[record["agreement"]] = Account(terms)
        elif kind == "approval":
            self.accounts[record["agreement"]].approvals.append(record["by"])
        elif kind == "end":
            self.accounts[record["agreement"]].ended = True
        elif kind == "vector":
            session = record["session"]
            self.accounts[record["agreement"]].vectors[session] = record["round"]
            self._sessions[session] = record["agreement"]
        elif kind == "answer":
            self._answers[record["session"], record["step"]] = record["request"]
        elif kind == "sum":
            self.accounts[record["agreement"]].sums.add(record["session"])
            self._answers[record["session"], "unmask"] = record["request"]
        elif kind == "overrun":
            self.accounts[record["agreement"]].overruns += 1
        elif kind == "budget":
            names = ("epsilon", "delta", "order", "neighbours")
            self.filter_terms = {name: record[name] for name in names}
        elif kind != "torn":
            raise ValueError(f"a record of kind {kind!r}")


def round_up(seconds: float) -> float:
    """To tenths: more would be nobody's business."""
    return -(-seconds * 10 // 1) / 10


def _begin(path: Path, node: str) -> None:
    """Make the file, whole or not at all; another process may do the same."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    Chain.create(part, holds=_HOLDS, node=node).close()
    try:
        os.link(part, path)
    except FileExistsError:
        pass
    finally:
        part.unlink()
    sync_folder(path.parent)
