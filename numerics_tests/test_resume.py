"""Stopping, saving and resuming in a new process changes no bit; resuming under other settings is an error.

Run as a script with a checkpoint, this file is the new process.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mxfp8_recipe import apply_recipe, revert
from numerics_tests.helpers import MLP, environment_of_tests, same_bits

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ("mxfp8", "gem")
OVERRIDES = {"1.down": {"dgrad": "bf16"}, "2.up": {"wgrad": {"grad_output": {"rounding": "stochastic"}}}}


def new_run(recipe: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(MLP() for _ in range(4)))
    apply_recipe(model, recipe, overrides=OVERRIDES)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(70, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()


def checkpoint_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    return copy.deepcopy(state)


def resume(path: Path) -> None:
    """Load the checkpoint of every recipe, train steps 10 to 19, and save what came out beside it."""
    finished = {}
    for recipe, state in torch.load(path).items():
        model, optimizer = new_run(recipe)
        model.load_state_dict(state["model"], strict=True)
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        train(model, optimizer, range(10, 20))
        finished[recipe] = checkpoint_of(model, optimizer)
    torch.save(finished, path.with_name("finished.pt"))


def test_ten_and_ten_steps_are_twenty(tmp_path: Path) -> None:
    halfway, whole = {}, {}
    for recipe in RECIPES:
        torch.manual_seed(3)
        model, optimizer = new_run(recipe)
        train(model, optimizer, range(10))
        halfway[recipe] = checkpoint_of(model, optimizer)
        train(model, optimizer, range(10, 20))
        whole[recipe] = checkpoint_of(model, optimizer)
    path = tmp_path / "halfway.pt"
    torch.save(halfway, path)
    environment = environment_of_tests(OMP_NUM_THREADS=str(torch.get_num_threads()))
    command = [sys.executable, str(Path(__file__).resolve()), str(path)]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert outcome.returncode == 0, outcome.stderr[-2000:]
    resumed = torch.load(tmp_path / "finished.pt")
    for recipe in RECIPES:
        assert torch.equal(resumed[recipe]["rng"], whole[recipe]["rng"])
        for name, weight in whole[recipe]["model"].items():
            assert same_bits(resumed[recipe]["model"][name], weight), (recipe, name)
            assert not torch.equal(halfway[recipe]["model"][name], weight)
        moments = whole[recipe]["optimizer"]["state"], resumed[recipe]["optimizer"]["state"]
        assert all(same_bits(moments[0][i]["exp_avg_sq"], moments[1][i]["exp_avg_sq"]) for i in moments[0])


def test_stochastic_rounding_needs_the_random_state() -> None:
    """The control: resuming without the stored generator state trains other weights."""
    torch.manual_seed(3)
    model, optimizer = new_run("gem")
    train(model, optimizer, range(2))
    state = checkpoint_of(model, optimizer)
    train(model, optimizer, range(2, 4))
    for restored in (True, False):
        again, optimizer = new_run("gem")
        again.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.manual_seed(99)
        if restored:
            torch.set_rng_state(state["rng"])
        train(again, optimizer, range(2, 4))
        assert same_bits(again[0].up.weight, model[0].up.weight) == restored


def saved(model: nn.Module, path: Path) -> dict[str, Any]:
    torch.save(model.state_dict(), path)
    return torch.load(path, weights_only=True)


def test_another_recipe_or_override_is_an_error_that_shows_the_difference(tmp_path: Path) -> None:
    source = MLP()
    apply_recipe(source, "mxfp8", overrides={"down": {"wgrad": "bf16"}})
    state = saved(source, tmp_path / "s.pt")
    target = MLP()
    before = target.up.weight.detach().clone()
    apply_recipe(target, "mxfp8_hopper", overrides={"down": "bf16"})
    with pytest.raises(ValueError, match="trained with another recipe or other overrides") as caught:
        target.load_state_dict(state)
    text = str(caught.value)
    assert "recipe: checkpoint mxfp8, model mxfp8_hopper" in text
    assert "up: checkpoint [fprop=1x32 @ 1x32" in text
    assert "model [fprop=1x128 @ 128x128" in text
    assert "down: checkpoint [fprop=1x32 @ 1x32; dgrad=1x32 @ 1x32; wgrad=bf16], model [bf16]" in text
    assert "revert(model), load, apply_recipe again" in text
    assert torch.equal(target.up.weight, before)


def test_the_same_settings_said_otherwise_are_no_difference(tmp_path: Path) -> None:
    """What counts is every layer's precision, not the words that led to it."""
    source, target = MLP(), MLP()
    apply_recipe(source, "mxfp8", overrides={"down": "mxfp8_square"})
    apply_recipe(target, "mxfp8", overrides={"re:.*own": {"fprop": {"weight": {"tile": "32x32"}}}, "up": "mxfp8"})
    with pytest.raises(ValueError, match=r"down: checkpoint \[fprop=1x32 @ 32x32; dgrad=1x32 @ 32x32"):
        target.load_state_dict(saved(source, tmp_path / "s.pt"))
    twin = MLP()
    apply_recipe(twin, overrides={"re:down": {g: {"weight": {"tile": "32x32"}} for g in ("fprop", "dgrad")}})
    twin.load_state_dict(saved(source, tmp_path / "s.pt"), strict=True)
    assert same_bits(twin.up.weight, source.up.weight)


def test_plain_checkpoints_and_reverted_models_load_freely(tmp_path: Path) -> None:
    source = MLP()
    apply_recipe(source)
    state = saved(source, tmp_path / "s.pt")
    plain = MLP()
    plain.load_state_dict(state, strict=True)
    other = MLP()
    apply_recipe(other, "mxfp8_square")
    other.load_state_dict(saved(plain, tmp_path / "p.pt"), strict=True)
    revert(other)
    other.load_state_dict(state, strict=True)
    apply_recipe(other, "mxfp8_hopper")
    with pytest.raises(ValueError, match="another recipe"):
        other.load_state_dict(state)


def test_a_copy_that_lost_the_record_is_loaded_with_a_word(recwarn: pytest.WarningsRecorder) -> None:
    """Nothing else tells it from a plain model's; a state dict that kept its metadata is quiet, plain ones too."""
    source, target, plain = MLP(), MLP(), MLP()
    apply_recipe(source)
    apply_recipe(target, "mxfp8_hopper")
    target.load_state_dict(plain.state_dict())
    target.load_state_dict(copy.deepcopy(target.state_dict()))
    plain.load_state_dict(dict(source.state_dict()))
    assert not recwarn.list
    for copied in (dict(source.state_dict()), {k: v.float() for k, v in source.state_dict().items()}):
        with pytest.warns(UserWarning, match="lost its metadata.*this model has recipe 'mxfp8_hopper'") as caught:
            target.load_state_dict(copied)
        (told,) = caught.list
        assert told.filename == __file__
    assert same_bits(target.up.weight, source.up.weight)


def test_a_recipe_applied_below_the_saved_root_is_checked_too(tmp_path: Path) -> None:
    source, target = (nn.ModuleDict({"tower": MLP()}) for _ in range(2))
    apply_recipe(source["tower"])
    apply_recipe(target["tower"], "mxfp8_hopper")
    with pytest.raises(ValueError, match="checkpoint mxfp8, model mxfp8_hopper"):
        target.load_state_dict(saved(source, tmp_path / "s.pt"))


if __name__ == "__main__":
    resume(Path(sys.argv[1]))
