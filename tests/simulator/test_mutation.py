"""Planted faults in our own backward's machine code must be caught; the full record is in mutation_record.json."""

import json
from pathlib import Path

import mutation
import pytest

from undertow.simulator import asm

RECORD = json.loads(Path(__file__).with_name("mutation_record.json").read_text())
SAMPLES = {
    "s_barrier deleted": 4,
    "s_waitcnt deleted": 6,
    "LDS offset shifted": 3,
    "MFMA operands swapped": 2,
    "mask dropped": 2,
}


@pytest.fixture(scope="module")
def planted():
    cases = [mutation.make_case(*lengths) for lengths in mutation.LENGTHS]
    assert len({case.text for case in cases}) == 1, "one text must serve the whole matrix"
    return cases, asm.parse(cases[0].text)


def test_no_false_alarm_on_the_unmodified_kernel(planted):
    cases, module = planted
    assert mutation.verdict(cases, module) is None


@pytest.mark.parametrize("kind", mutation.MUTANTS)
def test_a_sample_of_mutants_is_caught(planted, kind):
    cases, module = planted
    places = mutation.places(module, kind)
    chosen = places[:: max(1, len(places) // SAMPLES[kind])][: SAMPLES[kind]]
    survivors = [
        module.instructions[i].where()
        for i in chosen
        if mutation.verdict(cases, mutation.mutant(module, kind, i)) is None
    ]
    # one wait in the kernel is redundant on the matrix (see the record), and masks may be redundant
    assert len(survivors) <= (1 if kind in ("s_waitcnt deleted", "mask dropped") else 0), survivors


def test_the_record_holds_what_the_docs_claim():
    barriers, waits = (RECORD["mutants"][f"{name} deleted"] for name in ("s_barrier", "s_waitcnt"))
    assert RECORD["unmodified"] == "no finding, gradients right"
    assert barriers["killed"] >= 0.95 * barriers["planted"] > 0
    redundant = [s for s in waits["survivors"] if s["proof"]]
    assert waits["killed"] >= 0.8 * (waits["planted"] - len(redundant)) > 0
    assert len(waits["survivors"]) == waits["planted"] - waits["killed"]


def test_the_docs_quote_the_record():
    page = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    assert "\n".join(mutation.summary(RECORD)) in page


@pytest.mark.slow
def test_every_barrier_and_wait(planted):
    cases, module = planted
    for kind, rate in (("s_barrier deleted", 0.95), ("s_waitcnt deleted", 0.8)):
        places = mutation.places(module, kind)
        killed = sum(mutation.verdict(cases, mutation.mutant(module, kind, i)) is not None for i in places)
        assert killed >= rate * len(places), (kind, killed, len(places))
