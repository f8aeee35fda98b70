"""A node that decides for itself: what its site allows, in a file beside the node's identity.

SITE/identity          who the node is
SITE/site.toml         what it allows (`Site`)
SITE/identity.ledger   what it has agreed to and answered (`fpfl.federation.ledger`)
SITE/identity.paused   as long as it is there, nothing is answered

Without ``site.toml`` a node counts all the same: it answers the rounds of each agreement, and no
more sums than were agreed on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fpfl.federation.approval import terms_of
from fpfl.federation.ledger import Budget, Count, NodeLedger, NotAnsweredError
from fpfl.federation.node import RUN_BYTES, answered
from fpfl.federation.sealing import opened, sealed
from fpfl.federation.secagg import Identity, Message, Refused
from fpfl.store.files import write_whole

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from fpfl.data.federated import FederatedDataset
    from fpfl.data.inputs import Scaling
    from fpfl.fairness.totals import Weights
    from fpfl.federation.agreement import Agreement
    from fpfl.federation.contribution import Contribution

log = logging.getLogger("fpfl.federation")

Functions = tuple[Callable[[], "Agreement"], Callable[[Any], Any]]
"""What makes the agreement, and what reads the node's users."""

IDENTITY, SITE, LEDGER, PAUSED = "identity", "site.toml", ".ledger", ".paused"

_ONCE = ("consent", "unmask")
"""Steps that are answered for one request in a session, and no other."""

_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class BudgetSettings(_Part):
    """What all agreements together may cost this site's users: ε at δ, before the first one."""

    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    order: Annotated[int, Field(ge=2)] | None = None


class Package(_Part):
    """An installed package, and the hash of its files (`package_hash`)."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Site(_Part):
    """What a site allows its node.

    Parameters
    ----------
    approve
        Which agreements are answered: ``"ask"``, those that a person approved at this site;
        ``"first"``, the first one, and then those that were approved; a list of fingerprints, those
        and what was approved; ``"all"``, each one.
    budget
        ε at δ that all approved agreements together may cost this site's users.
    rounds
        The most sums that may be opened, of all approved agreements together.
    count
        What counts as one: ``"sums"``, those that this node gave shares for, or ``"vectors"``,
        each vector that it gave (`fpfl.federation.ledger` says what either is worth).
    package
        The package on this node whose code is run, and no other.
    agreement, load
        ``"module:function"`` of that package.
    node
        What ``load`` gets.
    """

    approve: Literal["ask", "first", "all"] | tuple[Fingerprint, ...] = "all"
    budget: BudgetSettings | None = None
    rounds: Annotated[int, Field(ge=1)] | None = None
    count: Count = "sums"
    package: Package | None = None
    agreement: Annotated[str, Field(pattern=_PATH)] | None = None
    load: Annotated[str, Field(pattern=_PATH)] | None = None
    node: Mapping[str, Any] = {}

    @model_validator(mode="after")
    def _together(self) -> Self:
        named = {"agreement": self.agreement, "load": self.load}
        if self.package is None:
            for name, value in named.items():
                if value is not None:
                    raise ValueError(
                        f"{name} is taken from a package that is pinned: add [package] with its "
                        "name and sha256 (fpfl federation pin NAME)"
                    )
            return self
        for name, value in named.items():
            if value is None or value.partition(":")[0].partition(".")[0] != self.package.name:
                raise ValueError(
                    f"{name} is {value!r}; with a package {self.package.name!r} it is a function "
                    f"of it, '{self.package.name}.module:function'"
                )
        return self

    @classmethod
    def read(cls, path: Path) -> Site:
        """The settings of a TOML file; a ValueError of one line says what is wrong with it."""
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not a TOML file: {error}") from error
        if isinstance(content.get("approve"), list):
            content["approve"] = tuple(content["approve"])
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            wrong = [
                f"{'.'.join(map(str, item['loc'])) or 'site'}: "
                f"{item['msg'].removeprefix('Value error, ')}"
                for item in error.errors()[:5]
            ]
            raise ValueError(f"{path}: {'; '.join(wrong)}") from error


# --- code that is on the node -----------------------------------------------------------------


def package_folder(name: str) -> Path:
    """Where an installed package is; it is not imported."""
    spec = find_spec(name)
    if spec is None or spec.origin is None or Path(spec.origin).name != "__init__.py":
        raise ValueError(
            f"there is no package {name!r} here: install it for this Python (a folder with an "
            "__init__.py), and see that its name is right"
        )
    return Path(spec.origin).parent


def package_hash(folder: Path) -> str:
    """SHA-256 over the sorted paths and contents of a package's files.

    What an installer adds beside them is not in it, nor is Python's cache, which is not used: the
    hash is the same wherever the same files are.
    """
    found = hashlib.sha256(b"fpfl package 1")
    files = []
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise ValueError(f"{path} is a link, and what it leads to can change: put a file there")
        inside = path.relative_to(folder)
        if path.is_file() and "__pycache__" not in inside.parts:
            files.append((inside.as_posix(), path))
    for name, path in sorted(files):
        for part in (name.encode(), path.read_bytes()):
            found.update(len(part).to_bytes(8, "big"))
            found.update(part)
    return found.hexdigest()


def check_package(package: Package) -> Path:
    """The folder of a pinned package; ValueError where it is not the one."""
    folder = package_folder(package.name)
    found = package_hash(folder)
    if found != package.sha256:
        raise ValueError(
            f"the package {package.name!r} in {folder} has the hash {found}, and site.toml pins "
            f"{package.sha256}: install the one that was approved, or review the new one and pin "
            "it (fpfl federation pin)"
        )
    return folder


def pinned(package: Package, name: str) -> Callable[..., Any]:
    """A function of the pinned package, from files that were checked just now."""
    folder = check_package(package)
    module, _, function = name.partition(":")
    with _without_cache():
        found = import_module(module)
    _check_place(found, folder)
    _check_place(sys.modules[package.name], folder)
    value = getattr(found, function, None)
    if not callable(value):
        raise ValueError(f"{name!r} names no function of the pinned package")
    return value  # type: ignore[no-any-return]


def _check_place(module: ModuleType, folder: Path) -> None:
    """That a module came from the files that were checked, and not from what was sent here."""
    file = getattr(module, "__file__", None)
    if file is None or folder.resolve() not in Path(file).resolve().parents:
        raise ValueError(
            f"the module {module.__name__!r} was loaded from {file}, not from the pinned package "
            f"in {folder}"
        )


@contextmanager
def _without_cache() -> Iterator[None]:
    """Import from sources alone: cached bytecode is in no hash."""
    before = sys.pycache_prefix
    with tempfile.TemporaryDirectory() as empty:
        sys.pycache_prefix = empty
        try:
            yield
        finally:
            sys.pycache_prefix = before


# --- the node -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SiteNode:
    """A node of a site: answers, or refuses and says so.

    Parameters
    ----------
    identity
        Who it is.
    site
        What is allowed.
    ledger
        What has been answered; None in Flower's simulation alone, where all nodes are one process
        and their data is in one place.
    paused
        The file that stops all answers.
    """

    identity: Identity
    site: Site
    ledger: NodeLedger | None
    paused: Path

    @classmethod
    def beside(
        cls, identity: Path, *, simulated: bool = False, who: Identity | None = None
    ) -> SiteNode:
        """The node of an identity file, by what is beside it.

        ``who`` is the identity where it has been read; else `Refused` where it counts no longer.
        """
        if who is None:
            from fpfl.federation.enrolment import load_identity

            who = load_identity(identity)
        settings, ledger = identity.with_name(SITE), None
        site = Site.read(settings) if settings.is_file() and not simulated else Site()
        if not simulated:
            ledger = NodeLedger.open(ledger_of(identity), who.name)
        return cls(who, site, ledger, paused_of(identity))

    @classmethod
    def at(cls, folder: Path) -> SiteNode:
        """The node of a site's folder, to look after: its identity may have ended."""
        _known(folder)
        path = folder / IDENTITY
        return cls.beside(path, who=Identity.from_bytes(path.read_bytes()))

    def close(self) -> None:
        """Close the ledger."""
        if self.ledger is not None:
            self.ledger.close()

    def answered(
        self,
        request: Mapping[str, Any],
        state: bytes,
        contribution: Callable[[], Contribution],
    ) -> tuple[bytes, Message]:
        """As `fpfl.federation.node.answered`, where the site allows it; the state is sealed.

        Nothing that the ledger has to know leaves before it is on the disk there.
        """
        session = request.get("session", b"")
        if not isinstance(session, bytes):
            raise Refused(self.identity.name, "the session is no bytes.")
        try:
            self._check_paused()
            self._check_asked(request, contribution)
            first = request.get("step") == "advertise"  # what there is of an old session goes
            kept, said = answered(
                request,
                b"" if first else opened(state, self.identity),
                self.identity,
                lambda: self._guarded(contribution(), session),
            )
            step = str(request.get("step"))
            if self.ledger is not None and step in _ONCE:
                self.ledger.give(step, session, _asked(request), self.site.count)
        except NotAnsweredError as error:
            if error.here:
                log.warning("%s %s", error, error.here)
            raise Refused(self.identity.name, str(error)) from None
        return sealed(kept, self.identity), said

    def functions(self) -> Functions | None:
        """Agreement and loader of the pinned package; None where the site pins none."""
        package, agreement, load = self.site.package, self.site.agreement, self.site.load
        if package is None or agreement is None or load is None:
            return None
        return pinned(package, agreement), pinned(package, load)

    def contribution(
        self,
        config: Mapping[str, Any] | None = None,
        sent: Callable[[], Functions] | None = None,
        kept: dict[str, Any] | None = None,
    ) -> Contribution:
        """What computes the node's vector; torch is imported here.

        Parameters
        ----------
        config
            What the node was told where it was started; ``[node]`` of site.toml wins.
        sent
            Gives agreement and loader, where the site pins none: a pinned package is run whatever
            else there is, and nothing is asked of what was sent.
        kept
            Where a process that stays keeps agreement and data; they are made once for the same
            settings.
        """
        from fpfl.federation.contribution import Contribution, SystemChance, TestChance

        found = self.functions() or (None if sent is None else sent())
        if found is None:
            raise ValueError(
                "this site pins no package, and no code was sent along: add [package], agreement "
                f"and load to {SITE}"
            )
        make, load = found
        given = {**(config or {}), **self.site.node}
        key = repr((self.site.package, self.site.agreement, self.site.load, sorted(given.items())))
        mine: dict[str, Any] = {} if kept is None else kept.setdefault(key, {})
        if "agreement" not in mine:
            mine["agreement"] = make()
        agreed: Agreement = mine["agreement"]

        def data() -> FederatedDataset:
            if "data" not in mine:
                mine["data"] = load(given)
            found: FederatedDataset = mine["data"]
            return found

        chance: SystemChance | TestChance = SystemChance()
        if agreed.test_seed is not None:
            numbers = [given.get(name) for name in ("partition-id", "first-user")]
            if not all(isinstance(number, int) for number in numbers):
                raise ValueError(
                    "with a test_seed a node must be told partition-id=... and first-user=..., "
                    "whole numbers"
                )
            number, first = (int(number) for number in numbers if number is not None)
            chance = TestChance(agreed.test_seed, number, first)
        return Contribution(agreed, data, chance)

    def _check_paused(self) -> None:
        if self.paused.exists():
            raise NotAnsweredError("this site has paused; it says when it goes on.")

    def _check_asked(
        self, request: Mapping[str, Any], contribution: Callable[[], Contribution]
    ) -> None:
        """At the first request: what will be refused later need not be begun."""
        run, round = request.get("run"), request.get("round")
        if self.ledger is None or not isinstance(run, bytes):
            return
        fingerprint = run[RUN_BYTES:].hex()
        account = self.ledger.accounts.get(fingerprint)
        if account is None or not account.approved:
            made = contribution().agreement
            if made.fingerprint.hex() != fingerprint:
                return  # it is refused by the protocol, in its own words
            self._admit(made)
        self.ledger.check(fingerprint, round, self.site.count)

    def _admit(self, agreement: Agreement) -> None:
        """Approve an agreement where the site's settings do, else propose it and refuse."""
        assert self.ledger is not None
        site, name = self.site, agreement.fingerprint.hex()
        terms = terms_of(agreement)
        if site.approve == "all":
            by, only = "all", _always
        elif site.approve == "first":
            by, only = "first", _is_first
        elif site.approve != "ask" and name in site.approve:
            by, only = "list", _always
        else:
            by, only = "", _never
        if not self.approve(name, by, terms=terms, only=only):
            self.ledger.propose(name, terms)
            self.ledger.check(name, None, site.count)

    def approve(
        self,
        fingerprint: str,
        by: str,
        *,
        terms: dict[str, Any] | None = None,
        again: bool = False,
        only: Callable[[NodeLedger], bool] | None = None,
    ) -> bool:
        """Approve an agreement under the site's settings; see `NodeLedger.approve`."""
        assert self.ledger is not None
        asked = self.site.budget
        return self.ledger.approve(
            fingerprint,
            by,
            terms=terms,
            budget=None if asked is None else Budget(asked.epsilon, asked.delta, asked.order),
            rounds=self.site.rounds,
            again=again,
            only=only or _always,
        )

    def _guarded(self, made: Contribution, session: bytes) -> Contribution:
        if self.ledger is None:
            return made
        fingerprint = made.agreement.fingerprint.hex()

        def overran(round: int, seconds: float) -> None:
            assert self.ledger is not None
            self.ledger.overran(fingerprint, round, seconds)

        return cast("Contribution", Guarded(self, replace(made, overran=overran), session))


@dataclass(frozen=True)
class Guarded:
    """A contribution that is made when the ledger has a line about it."""

    node: SiteNode
    made: Contribution
    session: bytes

    @property
    def agreement(self) -> Agreement:
        """What was agreed."""
        return self.made.agreement

    def vector(
        self,
        round: int,
        w: Tensor | None = None,
        weights: Weights | None = None,
        level: int | None = None,
        scaling: Scaling | None = None,
    ) -> NDArray[np.uint32]:
        """As `Contribution.vector`."""
        ledger, agreement = self.node.ledger, self.made.agreement
        assert ledger is not None
        name = agreement.fingerprint.hex()
        account = ledger.accounts.get(name)
        if account is None or not account.approved:
            self.node._admit(agreement)
        ledger.give_vector(self.session, name, round, self.node.site.count)
        return self.made.vector(round, w, weights, level, scaling)


def _asked(request: Mapping[str, Any]) -> bytes:
    """A hash of what is asked for: the survivors, where they are named, else all of it."""
    names = request.get("survivors")
    said = dict(request) if not isinstance(names, list) else {"survivors": sorted(map(str, names))}
    text = json.dumps(said, sort_keys=True, default=lambda value: ["bytes", bytes(value).hex()])
    return hashlib.sha256(text.encode()).digest()


def _always(ledger: NodeLedger) -> bool:
    return True


def _never(ledger: NodeLedger) -> bool:
    return False


def _is_first(ledger: NodeLedger) -> bool:
    return not any(account.approvals for account in ledger.accounts.values())


# --- the site's switches ------------------------------------------------------------------------


def ledger_of(identity: Path) -> Path:
    """The ledger beside an identity."""
    return identity.with_name(identity.name + LEDGER)


def paused_of(identity: Path) -> Path:
    """The switch beside an identity."""
    return identity.with_name(identity.name + PAUSED)


def pause(folder: Path) -> None:
    """Have a site's node refuse everything, from its next message on."""
    _known(folder)
    write_whole(paused_of(folder / IDENTITY), b"fpfl federation resume takes this file away.\n")


def resume(folder: Path) -> None:
    """Have it answer again."""
    _known(folder)
    paused_of(folder / IDENTITY).unlink(missing_ok=True)


def _known(folder: Path) -> None:
    if not (folder / IDENTITY).is_file():
        raise ValueError(f"{folder} has no {IDENTITY}: name the folder of a node's identity")


def figures(folder: Path) -> dict[str, Any]:
    """What a site's node has agreed to and answered, from its verified ledger; only looked at."""
    _known(folder)
    identity = folder / IDENTITY
    path, name = ledger_of(identity), Identity.from_bytes(identity.read_bytes()).name
    site = Site.read(folder / SITE) if (folder / SITE).is_file() else Site()
    said: dict[str, Any] = {
        "paused": paused_of(identity).exists(),
        "site": site.model_dump(mode="json"),
    }
    if not path.exists():
        return {"node": name, **said, "agreements": {}}
    with NodeLedger.open(path, name, write=False) as ledger:
        return {**ledger.as_dict(), **said}


def figures_in_words(found: dict[str, Any]) -> str:
    """The figures of a site, for people."""
    approve, budget = found["site"]["approve"], found.get("budget")
    by = approve if isinstance(approve, str) else f"{len(approve)} listed"
    lines = [
        f"{found['node']}: {'PAUSED' if found['paused'] else 'answering'}; approves: {by}.",
    ]
    if not found["agreements"]:
        return "\n".join([*lines, "No agreement has been proposed."])
    number, head = found["head"]
    lines.append(f"The ledger is in order; {number + 1} lines, the last one {head[:16]}.")
    for name, each in found["agreements"].items():
        if each["ended"]:
            state = "ended"
        elif each["approvals"]:
            state = f"approved ({', '.join(each['approvals'])})"
        else:
            state = "NOT APPROVED"
        epsilon = _epsilon(each["epsilon"])
        late = f"; {each['overruns']} took longer than hold" if each["overruns"] else ""
        lines.append(
            f"Agreement {name}: {state}; {epsilon} for {each['rounds']} rounds. Opened with this "
            f"node's shares: {each['sums']} of {each['limit']} sums. Vectors given: "
            f"{each['vectors']}{late}."
        )
    lines.append(
        f"By this node's own accounting, at δ = {found['delta']:.3g}: {_epsilon(found['spent'])} "
        f"of the sums that it helped to open, {_epsilon(found['at most'])} were every vector in "
        f"one, and {_epsilon(found['reserved'])} of all that is approved."
    )
    if budget is None:
        lines.append("There is no budget.")
    else:
        lines.append(
            f"Budget: ε = {budget['epsilon']:g} at δ = {budget['delta']:g} for all agreements "
            f"together (Rényi order {budget['order']}, {budget['neighbours']} neighbours)."
        )
    return "\n".join(lines)


def _epsilon(value: float | None) -> str:
    return "no bound on ε" if value is None else f"ε = {value:.4g}"
