"""The price of compression is measured beside what rounding alone costs, and only the user's limit
makes it RED."""

import numpy as np
import pytest
from tiny import prompt

from workbench import Decoder
from workbench.check import gates, golden, price, run
from workbench.check.compare import compare
from workbench.check.price import BUDGET_FACTOR, Price, measure_budget, price_gates
from workbench.models.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def compressed(exports, tiny_llama, llama_golden):
    """A bundle of 4-bit weights and its budget."""
    bundle = exports.bundle(tiny_llama.path, max_seq_len=32, compress="int4-block32")
    return bundle, measure_budget(bundle, tiny_llama, llama_golden)


def measure_price(decoder, reference, budget=None) -> Price:
    rows, _, chained = run.measure_fidelity(decoder, reference, budget=budget)
    return price.measure_price(reference, rows, chained, budget)


def verdicts(price, max_kl=gates.MAX_KL):
    return {g.name: g.verdict for g in price_gates(price, max_kl)}


def test_the_budget_of_compression_is_what_compression_costs(compressed, llama_golden):
    bundle, budget = compressed
    price = measure_price(Decoder(bundle, "portable"), llama_golden, budget=budget)
    assert price.worst["ratio"] < 1.5  # quantization dominates, and the budget holds it
    assert price.kl.mean() == pytest.approx(price.budget_kl.mean(), rel=0.2)
    found = price.json()
    assert (
        {"mean", "median", "p99", "max"}
        == found["kl"].keys()
        == found["budget"]["kl"].keys()
    )
    assert found["kl"]["median"] <= found["kl"]["p99"] <= found["kl"]["max"]


def test_the_limit_on_kl_is_the_user_s(compressed, llama_golden):
    bundle, budget = compressed
    price = measure_price(Decoder(bundle, "portable"), llama_golden, budget=budget)
    mean = float(price.kl.mean())
    assert verdicts(price, 1.01 * mean) == {"max_kl": "GREEN", "budget": "GREEN"}
    assert verdicts(price, 0.99 * mean) == {"max_kl": "RED", "budget": "GREEN"}
    assert "--max-kl sets" in price_gates(price, mean)[0].reason


def test_an_error_that_rounding_does_not_explain_is_red(
    llama_bundle, tiny_llama, llama_golden
):
    decoder = Decoder(llama_bundle, "portable")
    budget = measure_budget(llama_bundle, tiny_llama, llama_golden)
    clean = measure_price(decoder, llama_golden, budget=budget)
    assert verdicts(clean) == {"max_kl": "GREEN", "budget": "GREEN"}
    predict_calls = decoder.layers[1].predict_calls
    decoder.layers[1].predict_calls = lambda *operands: [
        {name: value * np.float32(1.03) for name, value in outputs.items()}
        for outputs in predict_calls(*operands)
    ]
    price = measure_price(decoder, llama_golden, budget=budget)
    assert verdicts(price, max_kl=9)["budget"] == "RED"
    assert (price.worst["layer"], price.worst["tensor"]) == (1, "update")


def test_without_the_checkpoint_there_is_no_budget(llama_bundle, llama_golden):
    price = measure_price(Decoder(llama_bundle, "portable"), llama_golden)
    assert verdicts(price) == {"max_kl": "GREEN", "budget": "not_run"}
    assert price.json()["budget"] is None and price.rows["error"].notna().all()


def test_values_that_are_no_numbers_are_red(llama_bundle, tiny_llama, llama_golden):
    budget = measure_budget(llama_bundle, tiny_llama, llama_golden)
    price = measure_price(
        Decoder(llama_bundle, "portable"), llama_golden, budget=budget
    )
    rows = price.rows.copy()
    rows.loc[5, "ratio"] = np.nan
    broken = Price(price.kl * np.nan, price.same_top, rows, price.budget_kl)
    assert verdicts(broken) == {"max_kl": "RED", "budget": "RED"}


def test_a_layer_that_adds_nothing_costs_nothing_and_may_add_nothing():
    still, moving = np.zeros((4, 8)), np.ones((4, 8))
    actual = {"update.0": still, "update.1": moving, "T": np.ones(4)}
    reference = {name: still for name in actual}
    ratios = compare(reference, actual, reference).groupby("layer")["ratio"].max()
    assert ratios[0] == 0 and ratios[1] > BUDGET_FACTOR


def test_the_budget_rounds_the_stream_as_the_bundle_holds_it(exports):
    """One massive channel: rounding the stream alone costs far more than an update's own
    rounding."""
    path = exports.checkpoint("llama")
    checkpoint, bundle = Checkpoint(path), exports.bundle(path)
    reference = golden.make_golden(checkpoint, prompt(97, 12))
    massive = reference["x.1"].copy()
    massive[:, :2] = 1500.0
    shifted = golden.Golden(reference.ids, reference.values | {"x.1": massive}, {})
    errors = []
    for source in (reference, shifted):
        budget = measure_budget(bundle, checkpoint, source)
        exact = golden.make_golden(checkpoint, source.ids, feed=source.values)
        errors.append(np.abs(budget["update.1"] - exact["update.1"]).max())
        held = budget["hidden.1"]
        assert (held == held.astype(np.float16)).all()
    assert errors[1] > 50 * errors[0]
