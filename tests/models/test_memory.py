"""Weights that wait in a file, and weights that memory has no room for."""

from types import SimpleNamespace

import pytest
import torch

from sink_lens.errors import ModelError
from sink_lens.models import load as loading
from sink_lens.models.load import load, wrap
from sink_lens.models.memory import store_parameters_on_disk
from tests.tiny_families import tiny


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "phi3"])
def test_weights_that_are_set_aside_take_no_memory_and_come_back_equal(family, tmp_path):
    lens = wrap(tiny(family))
    before = {name: one.detach().clone() for name, one in lens.plain.named_parameters()}
    with (
        pytest.raises(ZeroDivisionError),
        store_parameters_on_disk(lens.plain, folder=tmp_path),
    ):  # in any case
        assert {one.untyped_storage().nbytes() for one in lens.plain.parameters()} == {0}
        assert not list(
            tmp_path.iterdir()
        )  # the file has no name: nothing is left of a process that is killed
        raise ZeroDivisionError
    for name, one in lens.plain.named_parameters():
        assert torch.equal(one, before[name])  # the bytes of a file, not a second computation
    ids = torch.arange(5)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            lens.bridge(ids), lens.plain(input_ids=ids).logits, rtol=1e-4, atol=1e-4
        )


def test_weights_that_do_not_fit_are_refused_before_they_are_read(tmp_path, monkeypatch):
    tiny("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    monkeypatch.setattr(
        loading.psutil, "virtual_memory", lambda: SimpleNamespace(available=1.2 * stored)
    )
    monkeypatch.setattr(
        loading.AutoModelForCausalLM,
        "from_pretrained",
        lambda *a, **k: pytest.fail("they were read"),
    )
    with pytest.raises(
        ModelError,
        match=r"as float32 .* need dtype='auto', which keeps the 0.0 GB of the checkpoint",
    ):
        load(tmp_path)
    monkeypatch.undo()
    assert load(tmp_path).dtype == torch.float32
    monkeypatch.setattr(
        loading.psutil, "virtual_memory", lambda: SimpleNamespace(available=1.2 * stored)
    )
    assert load(tmp_path, dtype="auto").dtype == torch.bfloat16
    monkeypatch.setattr(
        loading.psutil, "virtual_memory", lambda: SimpleNamespace(available=0.5 * stored)
    )
    with pytest.raises(ModelError, match="need a smaller type"):
        load(tmp_path, dtype="auto")
