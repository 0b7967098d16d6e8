"""The page for TransformerLens's users: every block, on three families, gives what TransformerLens gives or a formula.

Two of the three have no BOS token in front, so that labels that came from a text would not fit.
"""

import re
import warnings
from pathlib import Path

import pytest
import torch
import transformer_lens.patching as reference

from sink_lens.models.tiny import tiny_tokenizer
from tests.tiny_families import tiny

PAGE = Path(__file__).parents[1] / "docs" / "tutorials" / "coming_from.md"


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma"])
def page(request, tmp_path_factory):
    """The names that the page's blocks leave."""
    folder = tmp_path_factory.mktemp("page")
    tiny(request.param).save_pretrained(folder / "my-model")
    tiny_tokenizer(adds_bos=request.param == "llama").save_pretrained(folder / "my-model")
    names = {"of_family": request.param}
    text = PAGE.read_text(encoding="utf-8").partition("## Edits and readings are hooks")[0]
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for block in re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S):
            exec(compile(block, PAGE.name, "exec"), names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("clean", "corrupted"):
            ids = names["TokenBatch"].from_prompts([names[name]], names["lens"].tokenizer).tokens
            names |= {
                f"{name}_ids": ids,
                f"{name}_cache": names["lens"].bridge.run_with_cache(ids)[1],
            }
    return names


def theirs(page, function, *more, behind=(), **options):
    """A result of ``transformer_lens.patching`` with the page's metric, and ours in the same shape."""
    ids = [
        page["lens"].tokenizer(one, add_special_tokens=False)["input_ids"][0]
        for one in (" the", " a")
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(
            page["lens"].bridge, page["corrupted_ids"], page["clean_cache"], *more,
            lambda logits: (logits[:, -1, ids[0]] - logits[:, -1, ids[1]]).mean(), *behind, **options,
        ).double()  # fmt: skip


def values(result):
    return torch.tensor(result.frame["value"].to_numpy(copy=True))


def test_the_pattern_and_its_view(page):
    torch.testing.assert_close(page["pattern"], page["cache"]["pattern", 1], rtol=1e-5, atol=1e-6)
    labels = [one.replace("\N{WORD JOINER}", "") for one in page["view"].props["tokens"]]
    assert len(labels) == page["view"].props["attention"].shape[-1] == page["pattern"].shape[-1]
    assert (labels[0] == "<s>") == (page["of_family"] == "llama")


def test_what_is_said_and_the_logit_lens(page):
    last = page["logits"][0, -1]
    rank = int((last > last[page["right"]]).sum())
    assert page["said"].loc[page["said"]["is_answer"], "rank"].item() == rank
    assert int(page["by_layer"].readout.target_ranks.flatten()[-1]) == rank


def test_patching_and_the_path(page):
    lens = page["lens"]
    stream = theirs(page, reference.get_act_patch_resid_pre)
    torch.testing.assert_close(
        values(page["by_position"]).view_as(stream), stream, rtol=0.0, atol=1e-5
    )
    heads = theirs(page, reference.get_act_patch_attn_head_out_all_pos)
    torch.testing.assert_close(values(page["heads"]).view_as(heads), heads, rtol=0.0, atol=1e-5)
    every = theirs(page, reference.get_act_patch_block_every)
    ours = values(page["every"]).view(lens.n_layers, -1, 3).permute(2, 0, 1)
    torch.testing.assert_close(ours, every, rtol=0.0, atol=1e-5)
    assert page["quick"].frame[["layer", "head"]].equals(page["heads"].frame[["layer", "head"]])
    more = {"behind": (0, 1, "q"), "verbose": False}
    direct = theirs(page, reference.get_act_patch_direct_path, page["corrupted_cache"], **more)
    assert page["path"].frame["value"].item() == pytest.approx(float(direct[1, 2]), abs=2e-5)


def test_steering(page):
    lens, ids = page["lens"], page["tokens"].tokens

    def add(x, hook):
        return x + 4.0 * page["vector"]

    for token in page["written"].ids:
        logits = lens.bridge.run_with_hooks(ids, fwd_hooks=[("blocks.1.hook_resid_post", add)])
        assert logits[0, -1].argmax().item() == token
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
