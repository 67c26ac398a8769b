"""How rows get to their experts and back under `--piper-dispatcher`.

Sources: piper_megatron/runtime/dispatch/ (`dispatcher.py`, `relay.py`, `rounds.py`, `rows.py`).
`flat`, `2dh` and `halo` replace the exchange of Megatron's alltoall and nothing else that is kept;
`rail` and `rbd` keep a row once for each rank that needs it, with the indices that spread it.

How many nodes there are is not known here. Relays are counted as if every rank of the expert group
were a node, which is the most that they can hold.
"""

import numpy as np

from piper_megatron.layout.sizes import Number
from piper_megatron.resources.activations.dispatch import PART, AllToAll, Dispatch
from piper_megatron.resources.activations.routing import expert_rows, sent_rows
from piper_megatron.resources.activations.setup import FP32, INT64
from piper_megatron.resources.activations.tape import Tensor
from piper_megatron.resources.dispatch_rows import distinct_domains


class Moved(AllToAll):
    """Rows of Megatron's permutation; those that come over two hops are in a buffer between."""

    def _between(self, rows: Number) -> Number:
        """`2dh` has them in another order, `halo` those that it passes on, at most all."""
        one_hop = self._setup.training.dispatcher in ("flat", "auto")
        return 0 if one_hop else self._when(self._steps()[0], rows * self._row)


class Relayed(Dispatch):
    """Rows once a node, then once a rank, copied for their experts there."""

    def _there(self, hidden: Tensor, probs: Tensor, rows: Tensor, weights: Tensor) -> None:
        tape, setup = self._tape, self._setup
        pairs, places = expert_rows(setup), setup.shard * setup.experts.count
        self._token = self._index("token of a sent row", self._sent())
        pair = self._index("sent pairs", sent_rows(setup))
        sent = tape.tensor("sent rows", self._sent() * self._row)
        sent_probs = tape.tensor("sent probabilities", sent_rows(setup) * self._probability())
        first = [self._token, pair]
        back = self._sums(self._sent(), setup.shard)
        tape.add(PART, [hidden, probs], [sent, sent_probs, *first], first, backward_extra=back)

        # places of pairs among the bits of all relayed rows, in two orders
        announced = 2 * places * INT64
        spread = [
            self._index("relayed rows", self._received()),
            self._index("relayed pairs", pairs / setup.sizes.etp),
        ]
        tape.add(PART, [sent_probs], spread, spread, forward_extra=announced)
        received = tape.tensor("received rows", self._received() * self._row)
        received_probs = tape.tensor(
            "received probabilities", pairs / setup.sizes.etp * self._probability()
        )
        there, back = self._relays()
        tape.add(
            PART,
            [sent, sent_probs],
            [received, received_probs],
            forward_extra=there,
            backward_extra=back,
        )
        self.held += [sent, received]
        self._spread = spread

        gathered = tape.tensor("gathered rows", self._where_shared(self._merged()))
        tape.add(PART, [received], [gathered])
        self._copies = [
            self._index("row of a pair", pairs),
            self._index("order of probabilities", pairs),
        ]
        tape.add(
            PART,
            [gathered, received_probs],
            [rows, weights, *self._copies],
            self._copies,
            backward_extra=self._handed_on() + self._sums(pairs, self._merged() / self._row),
        )

    def _back(self, rows: Tensor, out: Tensor) -> None:
        tape, setup = self._tape, self._setup
        merged = tape.tensor("rows by token", self._merged())
        wide = self._sums(expert_rows(setup), self._merged() / self._row)
        tape.add(PART, [rows], [merged], [self._copies[0]], forward_extra=wide)
        scattered = tape.tensor("scattered rows", self._where_shared(self._received() * self._row))
        tape.add(PART, [merged], [scattered])
        returned = tape.tensor("returned rows", self._sent() * self._row)
        there, back = self._relays()
        tape.add(
            PART,
            [scattered],
            [returned],
            [self._spread[0]],
            forward_extra=self._handed_on() + back,
            backward_extra=self._handed_on() + there,
        )
        wide = self._sums(self._sent(), setup.shard)
        tape.add(PART, [returned], [out], [self._token], forward_extra=wide)

    def _merged(self) -> Number:
        """Bytes of rows once for each rank, on all ranks that share their experts."""
        return self._received() * self._setup.sizes.etp * self._row

    def _handed_on(self) -> Number:
        """Bytes of such rows where a step that gathers or scatters them hands them on."""
        return self._when(np.asarray(self._setup.sizes.etp) == 1, self._merged())

    def _where_shared(self, bytes: Number) -> Number:
        return self._when(np.asarray(self._setup.sizes.etp) > 1, bytes)

    def _sent(self) -> Number:
        return self._setup.shard * distinct_domains(self._setup.experts, self._setup.sizes.ep)

    def _received(self) -> Number:
        """On the most loaded rank, before ranks that share experts gather."""
        return (
            self._sent()
            * expert_rows(self._setup)
            / (sent_rows(self._setup) * self._setup.sizes.etp)
        )

    def _relays(self) -> tuple[Number, Number]:
        """Buffers between the hops: of rows on their way there, and of sums on their way back."""
        relayed, fanned = self._sent() * self._row, self._received() * self._row
        exchanged = np.asarray(self._setup.sizes.ep) > 1
        sums = self._sums(self._received(), self._sent())
        return self._when(exchanged, relayed + fanned), self._when(
            exchanged, relayed + fanned + sums
        )

    def _sums(self, rows: Number, count: Number) -> Number:
        """Sums are taken in fp32: a wide copy of the rows, and the sums before they are rounded."""
        return 0 if self._setup.element >= FP32 else (rows + count) * self._width * FP32

    def _index(self, name: str, count: Number) -> Tensor:
        return self._tape.tensor(name, count * INT64, differentiable=False)
