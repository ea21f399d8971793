"""Importing agl_meta stays light, and the reading side needs none of the training stack."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("agentlightning", "verl", "torch", "ray", "numpy", "pydantic", "litellm", "transformers")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_loads_nothing_heavy() -> None:
    """None of the host's packages is in sys.modules after ``import agl_meta``."""
    loaded = json.loads(run("import agl_meta, sys, json; print(json.dumps(list(sys.modules)))"))
    assert "agl_meta" in loaded
    assert {name.split(".")[0] for name in loaded}.isdisjoint(HEAVY)


def test_reading_works_where_nothing_else_is_installed(tmp_path: Path) -> None:
    """With every import of the host's packages refused, a run can still be read."""
    shards = tmp_path / "global_step_2" / "val" / "shards"
    shards.mkdir(parents=True)
    code = f"""
import sys
for name in {HEAVY!r}:
    sys.modules[name] = None
import agl_meta
from agl_meta.records import record_line
context = agl_meta.TrainingContext(
    epoch=0, global_step=2, batch_index=0, is_train=False, reason="periodic", sample_index=0,
    sample_key="k", repeat_index=0, run_id="r", pass_path="global_step_2/val", is_stamped=True)
open({str(shards / "a.jsonl")!r}, "wb").write(record_line(context, "prediction", "prediction", {{"x": 1}}))
(prediction,) = agl_meta.read_predictions({str(tmp_path)!r})
print(prediction.value["x"], prediction.context.global_step)
"""
    assert run(code).split() == ["1", "2"]


@pytest.mark.parametrize("name", ["VERL", "TrainingContextHook"])
def test_name_that_needs_what_is_not_installed(name: str) -> None:
    """The error says what is missing and how to install it."""
    code = f"""
import sys
sys.modules["agentlightning"] = None
import agl_meta
try:
    agl_meta.{name}
except ImportError as error:
    print(error)
"""
    said = run(code)
    assert said.startswith(f"agl_meta.{name} needs agentlightning, which is not installed.")
    assert "pip install 'agl_meta[verl]'" in said


def test_public_names_exist() -> None:
    """Every name in ``__all__`` but those that need the host is there, and unknown ones are not."""
    import agl_meta

    for name in set(agl_meta.__all__) - {"VERL", "TrainingContextHook"}:
        assert getattr(agl_meta, name) is not None
        assert name in dir(agl_meta)
    with pytest.raises(AttributeError, match="no_such_name"):
        agl_meta.no_such_name  # noqa: B018
