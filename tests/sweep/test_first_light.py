"""First light: grids that any machine can rehearse. That another machine takes their packed log in,
tests/log/test_record.py shows, and that notebook 34 draws it, tests/experiment/test_notebooks.py."""

from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from workbench import sweep
from workbench.sweep.grid import check_cells
from workbench.sweep.seeded import first_light, noise


def test_its_grids_run_and_compare_a_state_on_the_cpu_and_the_neural_engine(
    tmp_path, monkeypatch
):
    """Though the first start was interrupted, and with a link to nothing among the files."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stopped = mock.Mock(side_effect=KeyboardInterrupt)
        patch.setattr("safetensors.torch.save_file", stopped)
        first_light(tmp_path)
    grids = first_light(tmp_path)
    Path(grids[0].checkpoint, "link").symlink_to("nowhere")
    for grid in grids:
        check_cells(list(sweep.cells(grid)), grid)
    units = [grid.run.compute_units for grid in grids if grid.validate_ids]
    assert ["CPU_ONLY", "CPU_AND_NE"] in units and max(map(len, units)) == 4


def test_seeded_values_are_equal_on_every_machine():
    values = noise(0)((2, 3)).numpy()
    drawn = (values / 12**0.5 + 0.5) * 2**24
    assert values.dtype == np.float32
    assert drawn.round().astype(int).tolist() == [
        [582872, 193722, 10266821],
        [4052523, 6131758, 1869415],
    ]
