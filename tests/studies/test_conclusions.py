"""The sentences and tables of single notebooks, from figures made for the test."""

from workbench.ane.rule import RULES
from workbench.studies import conclusions


def test_the_prediction_of_routed_experts_counts_the_programs_that_a_process_loads():
    """40 routers, 40 · 16 experts and 17 slices of the head are beyond rule G3's limit; 40 layers are not."""
    table = conclusions.routing_prediction().set_index("experts")
    assert table["programs"].to_dict() == {"dense": 57, "routed": 40 + 640 + 17}
    assert "128 loaded programs" in RULES["G3"].says and RULES["G3"].disputed
