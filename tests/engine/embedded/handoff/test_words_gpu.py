"""Words of leases on a GPU: the host has one when what the device ran behind it has ended."""

import pytest
import torch

from engine.embedded.handoff.words import LeaseWords
from engine.transfer.base import WORD_BYTES, LeaseWord
from engine.transfer.transfers import Transfers
from tests.support.transfer import ended, owning
from tests.support.transfer_owner import content

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20
PLACE = 7
WORD = int.from_bytes(content(0, (PLACE + 1) * WORD_BYTES)[-WORD_BYTES:], "little", signed=True)


def test_a_word_is_here_with_the_step_that_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    words = LeaseWords(torch.device("cuda"))
    transfers = Transfers([words.region], "cuda_ipc")
    with owning("cuda_ipc", MIB, 0, program="transfer_gpu_owner") as owner:
        ended(transfers.read(owner.offers, [words.read(LeaseWord(PLACE, WORD), 0)]))
        for _ in range(3):
            read = words.read(LeaseWord(PLACE, WORD), 0)
            transfer = transfers.queue(owner.offers, [read])
            assert transfer is not None
            words.follow(transfer, read)
            torch.zeros(1, device="cuda").item()  # a step
            assert transfer.done()
            with monkeypatch.context() as context:
                context.setattr(words, "_get", lambda place: 0)  # nobody asks the device for it
                assert words.outlived(LeaseWord(PLACE, WORD), read)
                assert not words.outlived(LeaseWord(PLACE, WORD + 1), read)
    transfers.close()


def test_a_word_is_waited_for_if_its_transfer_has_yet_to_begin() -> None:
    words = LeaseWords(torch.device("cuda"))
    transfers = Transfers([words.region], "cuda_ipc")
    with owning("cuda_ipc", MIB, 0, program="transfer_gpu_owner") as owner:
        read = words.read(LeaseWord(PLACE, WORD), 0)
        assert transfers.queue(owner.offers, [read]) is None, "the peer's memory is not open yet"
        ended(transfers.read(owner.offers, [read]))
        assert words.outlived(LeaseWord(PLACE, WORD), read)
    transfers.close()
