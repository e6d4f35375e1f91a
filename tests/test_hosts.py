"""The short form of hosts.py: three hosts in namespaces under torchrun; one dies, two go on."""

import hosts
import pytest
from rank_faults import prepare


@pytest.mark.faults
@pytest.mark.long
def test_the_rest_goes_on_without_a_lost_host(tmp_path) -> None:
    if why := hosts.available():
        pytest.skip(f"no hosts here: {why}")
    prepare(tmp_path)
    expected = hosts.one_process(tmp_path)
    assert sorted(expected) == list(range(1, hosts.STEPS + 1))
    assert hosts.elastic(tmp_path, expected, 3)["wrong"] == []
    # The controls: a step that is missing, and one with another loss.
    output = tmp_path / "run"
    assert hosts.same_losses(output, {**expected, hosts.STEPS + 1: 5.0})
    assert hosts.same_losses(output, {**expected, 3: expected[3] + 0.01})
