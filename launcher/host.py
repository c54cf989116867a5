"""What a worker runs: a bank of proxies behind the pool's `Host` protocol. Torch is loaded in the worker alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from proxies import canon
from proxies.canon import Json
from proxies.spec import RunSpec
from sweeps.pool import Finished

if TYPE_CHECKING:
    from proxies.bank import Bank
    from proxies.tokens import TokenStore


@dataclass(frozen=True, kw_only=True, slots=True)
class BankHostFactory:
    """Makes the host of a worker; travels to it."""

    corpus: str
    """Folder of the token shards, as the workers see it."""

    def __call__(self) -> BankHost:
        """A host with no bank yet."""
        return BankHost(Path(self.corpus))


class BankHost:
    """One bank at a time, rebuilt when the key changes."""

    def __init__(self, corpus: Path) -> None:
        self._corpus = corpus
        self._store: TokenStore | None = None
        self._bank: Bank | None = None
        self._key = ""

    def advance(
        self, bank_key: str, num_slots: int, admit: list[tuple[int, dict[str, Json]]], max_steps: int
    ) -> list[Finished]:
        """See `sweeps.pool.Host`."""
        specs = [(slot, canon.decode(RunSpec, spec)) for slot, spec in admit]
        if bank_key != self._key or self._bank is None:
            if not specs:
                raise ValueError("an empty bank was asked to advance")
            self._open(specs[0][1])
            self._key = bank_key
        bank = self._bank
        assert bank is not None
        for slot, spec in specs:
            bank.admit(slot, spec)
        return [
            Finished(
                slot=slot,
                result=cast(dict[str, Json], canon.to_json(result)),
                curve=cast(dict[str, Json], canon.to_json(curve)),
            )
            for slot, result, curve in bank.advance(max_steps)
        ]

    def _open(self, spec: RunSpec) -> None:
        from proxies.bank import Bank
        from proxies.tokens import TokenStore

        self._store = self._store or TokenStore(self._corpus, trusted=True)
        self._bank = Bank(spec.shape, spec.batch_tokens, spec.numerics, self._store)
